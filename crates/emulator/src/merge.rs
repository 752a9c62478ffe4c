//! The merge of narrow accesses. (Placeholder until the model lands.)

/// Accesses that become one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergeGroup {
    /// Positions of the members.
    pub members: Vec<usize>,
    /// The width of the merged access.
    pub bytes_per_lane: u32,
    /// The member with the lowest offset.
    pub leader: usize,
}

/// The groups of a kernel.
pub fn groups(_kernel: &ptx::Kernel) -> Vec<MergeGroup> {
    Vec::new()
}
