//! The pool examines itself: for tests, fuzzers and whoever doubts.

use crate::core::Core;
use crate::word::Word;

/// Walks every extent in address order and every structure; see [`crate::Pool::check`].
pub(crate) fn check<W: Word>(core: &Core<W>) -> Result<(), &'static str> {
    core.free.check()?;
    let (mut at, mut live, mut free, mut was_free) = (0, 0, 0, false);
    while at < core.granules {
        let Some((len, is_live)) = core.at(at) else {
            return Err("a position is neither live nor free");
        };
        if len == 0 {
            return Err("an extent is empty");
        }
        if !is_live && was_free {
            return Err("two free extents touch");
        }
        was_free = !is_live;
        live += usize::from(is_live);
        free += usize::from(!is_live);
        at += len;
    }
    if at != core.granules {
        return Err("the last extent leaves the pool");
    }
    if (live, free) != (core.live.len(), core.free.count()) {
        return Err("extents are recorded that no walk meets");
    }
    Ok(())
}
