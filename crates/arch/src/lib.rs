//! GPUs as facts: SM tables, occupancy, pipe rates, and what an architecture can do.
