//! What of a live conversation is on disk, and what is on its way there.

/// The checkpoints of a live conversation.
#[derive(Clone, Debug, Default)]
pub(super) struct Marks {
    /// None has fewer tokens than the one before.
    marks: Vec<Mark>,
}

/// The first `tokens` of the live ones are on disk, or on their way.
#[derive(Clone, Copy, Debug)]
struct Mark {
    tokens: u64,
    /// The save that is under way.
    save: Option<u64>,
}

impl Marks {
    /// The first so many tokens are on disk.
    pub(super) fn base(&self) -> u64 {
        let on_disk = |mark: &&Mark| mark.save.is_none();
        self.marks
            .iter()
            .rfind(on_disk)
            .map_or(0, |mark| mark.tokens)
    }

    /// The first so many tokens are on disk or on their way.
    pub(super) fn saved(&self) -> u64 {
        self.marks.last().map_or(0, |mark| mark.tokens)
    }

    /// The conversation was loaded from disk.
    pub(super) fn restore(&mut self, tokens: u64) {
        self.marks = vec![Mark { tokens, save: None }];
    }

    /// A save of so many tokens, more than any before, is under way.
    pub(super) fn begin(&mut self, tokens: u64, save: u64) {
        let save = Some(save);
        self.marks.push(Mark { tokens, save });
    }

    /// A save has ended. It need not be of what is live.
    pub(super) fn end(&mut self, save: u64, is_saved: bool) {
        let save = Some(save);
        match self.marks.iter_mut().find(|mark| mark.save == save) {
            Some(mark) if is_saved => mark.save = None,
            _ => self.marks.retain(|mark| mark.save != save),
        }
    }

    /// The conversation went back to so many tokens. Where prefixes are restored the beginning of a
    /// longer checkpoint is one, too.
    pub(super) fn cut(&mut self, tokens: u64, saves_prefixes: bool) {
        let kept = self.marks.partition_point(|mark| mark.tokens <= tokens);
        let cut = self.marks.split_off(kept);
        let on_disk = cut.iter().find(|mark| mark.save.is_none());
        if let Some(mark) = on_disk.or_else(|| cut.first())
            && saves_prefixes
        {
            self.marks.push(Mark { tokens, ..*mark });
        }
    }

    /// Only the first so many tokens are left on disk. What is on its way still comes.
    pub(super) fn lose(&mut self, tokens: u64, saves_prefixes: bool) {
        let is_lost = |mark: &Mark| mark.tokens > tokens && mark.save.is_none();
        let is_cut = self.marks.iter().any(is_lost);
        self.marks.retain(|mark| !is_lost(mark));
        if is_cut && saves_prefixes {
            let place = self.marks.partition_point(|mark| mark.tokens <= tokens);
            self.marks.insert(place, Mark { tokens, save: None });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1,000 tokens on disk, and 12,000 on their way.
    fn marks() -> Marks {
        let mut marks = Marks::default();
        marks.restore(1000);
        marks.begin(12_000, 7);
        marks
    }

    fn counts(marks: &Marks) -> (u64, u64) {
        (marks.base(), marks.saved())
    }

    #[test]
    fn a_save_counts_for_the_next_one_at_once_and_as_a_base_at_its_end() {
        let mut marks = marks();
        assert_eq!(counts(&marks), (1000, 12_000));
        marks.end(7, true);
        assert_eq!(counts(&marks), (12_000, 12_000));
    }

    #[test]
    fn of_several_saves_under_way_each_may_fail_alone() {
        let mut marks = marks();
        marks.begin(25_000, 8);
        marks.end(7, false);
        assert_eq!(counts(&marks), (1000, 25_000));
        marks.end(8, true);
        assert_eq!(counts(&marks), (25_000, 25_000));
    }

    #[test]
    fn after_going_back_the_same_count_is_other_tokens() {
        let mut marks = marks();
        marks.cut(11_000, false);
        assert_eq!(counts(&marks), (1000, 1000));
        marks.end(7, true);
        assert_eq!(counts(&marks), (1000, 1000), "it is of what was");
        marks.cut(999, false);
        assert_eq!(counts(&marks), (0, 0));
    }

    #[test]
    fn where_prefixes_are_restored_a_save_is_one_of_what_is_left() {
        let mut marks = marks();
        marks.cut(11_000, true);
        assert_eq!(counts(&marks), (1000, 11_000));
        marks.end(7, true);
        assert_eq!(counts(&marks), (11_000, 11_000));
        marks.cut(0, true);
        assert_eq!(counts(&marks), (0, 0));
    }

    #[test]
    fn what_is_on_its_way_is_not_lost() {
        let mut marks = marks();
        marks.lose(400, true);
        assert_eq!(counts(&marks), (400, 12_000));
        marks.lose(0, true);
        assert_eq!(counts(&marks), (0, 12_000));
    }
}
