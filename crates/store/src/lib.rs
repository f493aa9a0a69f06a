//! What bytes mean: keys, namespaces, records, index, eviction, tiers, pipelines.
