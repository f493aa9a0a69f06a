//! Plain sockets: the far side of what is measured against, in the target's process.
//!
//! A connection carries one order after the other, 32 bytes each, and what they are followed by.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use kvdepot_media::{Buffer, stream};

/// Bytes of a send or of a receive.
pub(super) const EACH: usize = 1 << 20;

/// What the far side is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Receive so many bytes into its memory from an offset on, and send one byte then.
    Take { offset: u64, bytes: u64 },
    /// Send so many bytes of its memory from an offset on.
    Give { offset: u64, bytes: u64 },
    /// So many times: receive a question of so many bytes, and send an answer of so many.
    Answer { asked: u64, said: u64, times: u64 },
    /// Say its processor time, in nanoseconds.
    Clock,
    /// Register so many ranges of its memory with an engine, publish them, and say how many
    /// nanoseconds each took.
    Register { ranges: u64 },
}

impl Order {
    fn words(self) -> [u64; 4] {
        match self {
            Order::Take { offset, bytes } => [1, offset, bytes, 0],
            Order::Give { offset, bytes } => [2, offset, bytes, 0],
            Order::Answer { asked, said, times } => [3, asked, said, times],
            Order::Clock => [4, 0, 0, 0],
            Order::Register { ranges } => [5, ranges, 0, 0],
        }
    }

    fn of(words: [u64; 4]) -> io::Result<Order> {
        let [kind, one, two, three] = words;
        match kind {
            1 => Ok(Order::Take {
                offset: one,
                bytes: two,
            }),
            2 => Ok(Order::Give {
                offset: one,
                bytes: two,
            }),
            3 => Ok(Order::Answer {
                asked: one,
                said: two,
                times: three,
            }),
            4 => Ok(Order::Clock),
            5 => Ok(Order::Register { ranges: one }),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Tells the far side.
    pub(super) fn tell(self, mut socket: &TcpStream) -> io::Result<()> {
        let mut bytes = [0; 32];
        for (at, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(self.words()) {
            *at = word.to_le_bytes();
        }
        socket.write_all(&bytes)
    }

    fn hear(mut socket: &TcpStream) -> io::Result<Order> {
        let mut bytes = [0; 32];
        socket.read_exact(&mut bytes)?;
        let mut words = [0; 4];
        for (word, at) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*at);
        }
        Order::of(words)
    }
}

/// Registers ranges; answers how long registering and publishing took.
pub(super) type Register<'a> = dyn Fn(u64) -> io::Result<[u64; 2]> + Sync + 'a;

/// Serves all connections that come, each in a thread, until the process ends.
pub(super) fn serve(listener: &TcpListener, memory: &Buffer, register: &Register<'_>) {
    std::thread::scope(|scope| {
        while let Ok((socket, _)) = listener.accept() {
            scope.spawn(move || {
                // Where it may run as the engine's threads may.
                let _cpus = kvdepot_host::cpu::reset_affinity();
                let _nodelay = socket.set_nodelay(true);
                while obey(&socket, memory, register).is_ok() {}
            });
        }
    });
}

fn obey(mut socket: &TcpStream, memory: &Buffer, register: &Register<'_>) -> io::Result<()> {
    match Order::hear(socket)? {
        Order::Take { offset, bytes } => {
            let range = offset as usize..(offset + bytes) as usize;
            stream::receive(socket.as_fd(), memory, range, EACH)?;
            socket.write_all(&[1])
        }
        Order::Give { offset, bytes } => {
            let range = offset as usize..(offset + bytes) as usize;
            stream::send(socket.as_fd(), memory, range, EACH)
        }
        Order::Answer { asked, said, times } => {
            let (mut question, answer) = (vec![0; asked as usize], vec![1; said as usize]);
            for _ in 0..times {
                socket.read_exact(&mut question)?;
                socket.write_all(&answer)?;
            }
            Ok(())
        }
        Order::Clock => {
            let spent = kvdepot_host::cpu::process_time().as_nanos() as u64;
            socket.write_all(&spent.to_le_bytes())
        }
        Order::Register { ranges } => {
            for nanoseconds in register(ranges)? {
                socket.write_all(&nanoseconds.to_le_bytes())?;
            }
            Ok(())
        }
    }
}
