"""Whether a connector serves KV that another configuration computed."""
