//! Generators and house rules of the kvdepot tree.
