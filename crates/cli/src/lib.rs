//! The kvdepot command.
