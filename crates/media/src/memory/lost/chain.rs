//! The handler of `SIGBUS`, and those that others have installed before and after it.
//!
//! There is one disposition of a signal for a process. Whoever sets another later, as Python's
//! `faulthandler` does, takes this one out of the way, so it is looked at with every new mapping
//! and installed again on top of what stands there. That one may lead back to ours, which it found
//! when it was installed. So ours is several functions, one for each place in the chain, each with
//! its own predecessor: a fault that is none of ours goes down the chain and comes to its end.

use std::io;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicUsize, Ordering};

/// Predecessors that are told apart. More than a process has, with some that come and go.
const LEVELS: usize = 8;

type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// Our handler for each predecessor; the last one's is the system's own action.
static HANDLERS: [Handler; LEVELS + 1] = [
    on_fault::<0>,
    on_fault::<1>,
    on_fault::<2>,
    on_fault::<3>,
    on_fault::<4>,
    on_fault::<5>,
    on_fault::<6>,
    on_fault::<7>,
    on_fault::<LEVELS>,
];

/// What was there when a level's handler was installed.
struct Before {
    state: AtomicU8,
    action: AtomicUsize,
    flags: AtomicI32,
}

/// A level whose handler was never installed, that is being made, and that is made for good.
const UNUSED: u8 = 0;
const TAKEN: u8 = 1;
const MADE: u8 = 2;

static BEFORE: [Before; LEVELS + 1] = [const {
    Before {
        state: AtomicU8::new(UNUSED),
        action: AtomicUsize::new(libc::SIG_DFL),
        flags: AtomicI32::new(0),
    }
}; LEVELS + 1];

/// Makes sure that the handler is the first to be asked. There is no lock, which a forked child
/// could find held: of two threads at once, both may install a handler, one over the other's
/// predecessor as well.
pub(super) fn install() -> io::Result<()> {
    if cfg!(miri) {
        return Ok(()); // Has no signals.
    }
    // SAFETY: all zeros are a valid `sigaction`.
    let (mut found, mut ours): (libc::sigaction, libc::sigaction) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: asks only; `found` is writable.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut found) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if HANDLERS.map(address).contains(&found.sa_sigaction) {
        return Ok(());
    }
    let level = level_over(found.sa_sigaction, found.sa_flags);
    ours.sa_sigaction = address(HANDLERS[level]);
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler does only what one may, see there; the mask is empty.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn address(handler: Handler) -> libc::sighandler_t {
    handler as libc::sighandler_t
}

/// The level whose predecessor is this one: the one that was, or a new one. When all are used, what
/// would go to this predecessor ends the process.
fn level_over(action: libc::sighandler_t, flags: i32) -> usize {
    for (level, before) in BEFORE.iter().enumerate().take(LEVELS) {
        if before.state.load(Ordering::Acquire) == MADE
            && before.action.load(Ordering::Relaxed) == action
            && before.flags.load(Ordering::Relaxed) == flags
        {
            return level;
        }
        let taken =
            before
                .state
                .compare_exchange(UNUSED, TAKEN, Ordering::Acquire, Ordering::Relaxed);
        if taken.is_ok() {
            before.action.store(action, Ordering::Relaxed);
            before.flags.store(flags, Ordering::Relaxed);
            // Found by the handler, which is installed after this.
            before.state.store(MADE, Ordering::Release);
            return level;
        }
    }
    LEVELS
}

/// Only atomics, `fstat`, `mmap` and `sigaction`, all of which a handler may use, and `errno` is
/// kept.
extern "C" fn on_fault<const LEVEL: usize>(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO a valid `info`; a positive code says that
    // it stands for a fault, which has an address.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let is_fault = code > 0;
    // SAFETY: `errno` of this thread.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let kept = unsafe { *errno };
    let replaced = is_fault && super::replace(addr);
    if !replaced {
        pass_on(&BEFORE[LEVEL], signal, info, context);
    }
    // SAFETY: as above.
    unsafe { *errno = kept };
}

/// Lets whoever handled the signal before handle it.
fn pass_on(
    before: &Before,
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: as in `on_fault`.
    let code = unsafe { (*info).si_code };
    let is_fault = code > 0;
    match before.action.load(Ordering::Relaxed) {
        libc::SIG_IGN if !is_fault => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // A handler that was installed later and calls this one by `raise`, as Python's
            // faulthandler does, comes without an address; the fault itself comes again.
            if code == libc::SI_TKILL {
                return;
            }
            // SAFETY: all zeros but for the default action are a valid `sigaction`.
            unsafe {
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &raw const default, std::ptr::null_mut());
                if !is_fault {
                    libc::raise(signal);
                }
            }
        }
        handler if before.flags.load(Ordering::Relaxed) & libc::SA_SIGINFO != 0 => {
            // SAFETY: with that flag it is a function of these arguments.
            unsafe {
                let handler: Handler = std::mem::transmute(handler);
                handler(signal, info, context);
            }
        }
        handler => {
            // SAFETY: without that flag it is a function of the signal's number.
            unsafe {
                let handler: extern "C" fn(libc::c_int) = std::mem::transmute(handler);
                handler(signal);
            }
        }
    }
}
