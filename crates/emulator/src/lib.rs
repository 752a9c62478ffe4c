//! Runs a ptx::Kernel on the CPU, exactly and counted.
