//! The checkpoint policy: events of an engine, and the saves that are due.

use std::ffi::{CStr, c_char};
use std::ptr;

use kvdepot_session::policy::{Answer, Declined, Origin, Policy, Prompt, Reason, Settings, Writes};
use parking_lot::Mutex;

use crate::given::{Growing, In, NONE, Out, Plain, flag, maybe, moment};
use crate::guard::Failure;
use crate::handle::{Made, Ref};

/// Settings of a policy, `kvd_policy_settings`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Given {
    /// Size of the struct in bytes, as the caller knows it.
    pub struct_size: usize,
    /// Disk space in bytes; larger checkpoints are declined.
    pub disk_space: u64,
    /// Fewest tokens that are saved.
    pub min_tokens: u64,
    /// Most tokens of a cold checkpoint; 0 for none.
    pub cold_max_tokens: u64,
    /// Tokens between continued checkpoints; 0 for none.
    pub continued_interval_tokens: u64,
    /// Tokens at the end of a prompt that a cold checkpoint omits.
    pub boundary_trim_tokens: u64,
    /// Alignment of cold checkpoints in tokens; 0 for any number.
    pub boundary_align_tokens: u64,
    /// Most bytes written in any hour; `KVD_NONE` for no limit.
    pub write_budget_hour: u64,
    /// Most bytes written in any day; `KVD_NONE` for no limit.
    pub write_budget_day: u64,
    /// Most bytes of a checkpoint that do not depend on its length.
    pub fixed_bytes: u64,
    /// Most bytes of one token.
    pub token_bytes: u64,
    /// 1 if the engine can save and restore the first tokens of a state.
    pub saves_prefixes: u32,
    /// 1 if each save writes the whole state.
    pub writes_whole: u32,
}

// SAFETY: numbers.
unsafe impl Plain for Given {}

// SAFETY: `repr(C)`, and the size is the first field.
unsafe impl Growing for Given {
    const FIRST: usize = 96;
}

/// Response of a policy to an event, `kvd_answer`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Due {
    /// Size of the struct in bytes, as the caller knows it.
    pub struct_size: usize,
    /// `KVD_ACTION_NONE`, `KVD_ACTION_SAVE` or `KVD_ACTION_DECLINED`.
    pub action: u32,
    /// A `kvd_reason`, for a save.
    pub reason: u32,
    /// Number of the save.
    pub save: u64,
    /// Number of tokens to save.
    pub tokens: u64,
    /// Leading tokens that are saved already.
    pub base: u64,
    /// Most bytes that the save may write.
    pub bytes: u64,
    /// Reason of a declined save, or null.
    pub declined: *const c_char,
}

// SAFETY: numbers and a pointer.
unsafe impl Plain for Due {}

// SAFETY: `repr(C)`, and the size is the first field.
unsafe impl Growing for Due {
    const FIRST: usize = 56;
}

impl Given {
    fn of(settings: &Settings) -> Given {
        Given {
            struct_size: 0,
            disk_space: settings.disk_space,
            min_tokens: settings.min_tokens,
            cold_max_tokens: settings.cold_max_tokens,
            continued_interval_tokens: settings.continued_interval_tokens,
            boundary_trim_tokens: settings.boundary_trim_tokens,
            boundary_align_tokens: settings.boundary_align_tokens,
            write_budget_hour: settings.write_budget_hour.unwrap_or(NONE),
            write_budget_day: settings.write_budget_day.unwrap_or(NONE),
            fixed_bytes: settings.fixed_bytes,
            token_bytes: settings.token_bytes,
            saves_prefixes: settings.saves_prefixes.into(),
            writes_whole: (settings.writes == Writes::Whole).into(),
        }
    }

    fn settings(&self) -> Result<Settings, Failure> {
        Ok(Settings {
            disk_space: self.disk_space,
            min_tokens: self.min_tokens,
            cold_max_tokens: self.cold_max_tokens,
            continued_interval_tokens: self.continued_interval_tokens,
            boundary_trim_tokens: self.boundary_trim_tokens,
            boundary_align_tokens: self.boundary_align_tokens,
            write_budget_hour: maybe(self.write_budget_hour),
            write_budget_day: maybe(self.write_budget_day),
            writes: match flag("writes_whole", self.writes_whole)? {
                true => Writes::Whole,
                false => Writes::Delta,
            },
            saves_prefixes: flag("saves_prefixes", self.saves_prefixes)?,
            fixed_bytes: self.fixed_bytes,
            token_bytes: self.token_bytes,
        })
    }
}

pub(crate) fn number(reason: Reason) -> u32 {
    match reason {
        Reason::Cold => 1,
        Reason::Continued => 2,
        Reason::Evict => 3,
        Reason::Shutdown => 4,
        _ => 0,
    }
}

fn why(declined: Declined) -> &'static CStr {
    match declined {
        Declined::TooShort => c"too short",
        Declined::NothingNew => c"nothing new since the last save",
        Declined::LittleNew => c"too little new since the last save",
        Declined::TooLarge => c"larger than the disk space",
        Declined::WriteBudget => c"write budget",
        Declined::OverBudget => c"larger than a whole write budget",
        _ => c"declined",
    }
}

fn due(answer: Answer) -> Due {
    let nothing = Due {
        struct_size: 0,
        action: 0,
        reason: 0,
        save: 0,
        tokens: 0,
        base: 0,
        bytes: 0,
        declined: ptr::null(),
    };
    match answer {
        Answer::Save(save) => Due {
            action: 1,
            reason: number(save.reason),
            save: save.id,
            tokens: save.tokens,
            base: save.base,
            bytes: save.bytes,
            ..nothing
        },
        Answer::Declined(declined) => Due {
            action: 2,
            declined: why(declined).as_ptr(),
            ..nothing
        },
        _ => nothing,
    }
}

exported! {
    /// Implements `kvd_policy_defaults`.
    fn kvd_policy_defaults(settings: Out<Given>) {
        settings.sized("settings")?.put(&Given::of(&Settings::default()));
        Ok(())
    }

    /// Implements `kvd_policy_open`.
    fn kvd_policy_open(settings: In<Given>, policy: Made<Mutex<Policy>>) {
        let policy = policy.making("policy")?;
        let settings = settings.read("settings")?.settings()?;
        policy.put(Mutex::new(Policy::new(settings)?));
        Ok(())
    }

    /// Implements `kvd_policy_close`.
    fn kvd_policy_close(policy: Ref<Mutex<Policy>>) {
        drop(policy.end());
        Ok(())
    }

    /// Implements `kvd_policy_start`.
    fn kvd_policy_start(
        policy: Ref<Mutex<Policy>>, slot: u32, tokens: u64, origin: u32, origin_tokens: u64,
        anchor: u64,
    ) {
        let policy = policy.get("policy")?;
        let origin = match origin {
            0 => Origin::Empty,
            1 => Origin::Restored(origin_tokens),
            2 => Origin::Live(origin_tokens),
            other => {
                let allowed = "KVD_ORIGIN_EMPTY, KVD_ORIGIN_RESTORED or KVD_ORIGIN_LIVE";
                return Err(Failure::input("origin", other, allowed));
            }
        };
        let anchor = maybe(anchor);
        policy.lock().start(slot, &Prompt { tokens, origin, anchor });
        Ok(())
    }

    /// Implements `kvd_policy_next_stop`.
    fn kvd_policy_next_stop(policy: Ref<Mutex<Policy>>, slot: u32, stop: Out<u64>) {
        let stop = stop.place("stop")?;
        let next = policy.get("policy")?.lock().next_stop(slot);
        stop.put(next.unwrap_or(NONE));
        Ok(())
    }

    /// Implements `kvd_policy_event`.
    fn kvd_policy_event(
        policy: Ref<Mutex<Policy>>, event: u32, slot: u32, tokens: u64, at_ms: u64,
        answer: Out<Due>,
    ) {
        let answer = answer.sized("answer")?;
        let policy = policy.get("policy")?;
        let told: fn(&mut Policy, u32, u64, std::time::Duration) -> Answer = match event {
            0 => Policy::prefill,
            1 => Policy::decode,
            2 => Policy::switch,
            3 => Policy::shutdown,
            other => {
                let allowed = "KVD_EVENT_PREFILL, KVD_EVENT_DECODE, KVD_EVENT_SWITCH or \
                               KVD_EVENT_END";
                return Err(Failure::input("event", other, allowed));
            }
        };
        let said = told(&mut policy.lock(), slot, tokens, moment(at_ms));
        answer.put(&due(said));
        Ok(())
    }

    /// Implements `kvd_policy_truncate`.
    fn kvd_policy_truncate(policy: Ref<Mutex<Policy>>, slot: u32, tokens: u64) {
        policy.get("policy")?.lock().lost(slot, tokens);
        Ok(())
    }

    /// Implements `kvd_policy_saved`.
    fn kvd_policy_saved(policy: Ref<Mutex<Policy>>, save: u64, bytes: u64, at_ms: u64) {
        Ok(policy.get("policy")?.lock().saved(save, bytes, moment(at_ms))?)
    }

    /// Implements `kvd_policy_failed`.
    fn kvd_policy_failed(policy: Ref<Mutex<Policy>>, save: u64, bytes: u64, at_ms: u64) {
        Ok(policy.get("policy")?.lock().failed(save, bytes, moment(at_ms))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_words() {
        for declined in Declined::ALL {
            assert_eq!(why(declined).to_bytes(), declined.name().as_bytes());
        }
    }
}
