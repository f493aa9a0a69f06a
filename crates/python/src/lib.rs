//! Python binding of kvdepot.
