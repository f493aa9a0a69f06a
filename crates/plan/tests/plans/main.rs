//! Batches: planning and joining.

mod join;
mod model_plan;
