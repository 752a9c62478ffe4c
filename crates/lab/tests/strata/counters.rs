//! What is counted on the way.
