//! Graphs: work recorded once and replayed with one call.

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUresult, CUstreamCaptureMode};

use crate::context::{Context, Handle};
use crate::error::Error;
use crate::stream::Stream;

/// Launches that are replayed together.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    graph: Handle<sys::CUgraph_st>,
    executable: Handle<sys::CUgraphExec_st>,
}

impl Graph {
    /// Records what `work` enqueues; it does not run. Only launches and events can be recorded.
    ///
    /// # Errors
    /// Those of `work`, and the driver's when `work` did what cannot be recorded (waiting, for one).
    pub fn record(stream: &mut Stream, work: impl FnOnce(&mut Stream) -> Result<(), Error>) -> Result<Self, Error> {
        let context = stream.context.clone();
        let _current = context.current()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        let code = unsafe { sys::cuStreamBeginCapture_v2(stream.raw.0, mode) };
        context.check("cuStreamBeginCapture", code)?;
        let done = work(stream);
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: the stream is alive and recording; the driver writes one handle, which is destroyed once.
        let code = unsafe { sys::cuStreamEndCapture(stream.raw.0, &mut graph) };
        let mut recorded =
            Self { context: context.clone(), graph: Handle(graph), executable: Handle(std::ptr::null_mut()) };
        done?;
        context.check("cuStreamEndCapture", code)?;
        let mut executable: CUgraphExec = std::ptr::null_mut();
        // SAFETY: the graph is alive; the driver writes one handle, which is destroyed once.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) };
        context.check("cuGraphInstantiateWithFlags", code)?;
        recorded.executable = Handle(executable);
        Ok(recorded)
    }

    /// Runs it once, after what is in the stream; does not wait. The memory it uses must still be allocated.
    ///
    /// # Errors
    /// When the driver refuses it, or something before it faulted.
    pub fn replay(&self, stream: &mut Stream) -> Result<(), Error> {
        let _current = self.context.current()?;
        // SAFETY: the graph is instantiated and alive, and so is the stream.
        let code = unsafe { sys::cuGraphLaunch(self.executable.0, stream.raw.0) };
        stream.check("cuGraphLaunch", code)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.current() {
            // SAFETY: each handle was made by `record`, is not null, and is destroyed once.
            unsafe {
                if !self.executable.0.is_null() {
                    let _: CUresult = sys::cuGraphExecDestroy(self.executable.0);
                }
                if !self.graph.0.is_null() {
                    let _: CUresult = sys::cuGraphDestroy(self.graph.0);
                }
            }
        }
    }
}
