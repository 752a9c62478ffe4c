//! Where a caller's tensors lie: their description, checked against a problem.

use kernels::{Cache, Dtype, InputError, Layout, Problem, Strides};
use thiserror::Error;

/// A tensor in somebody's memory, described: no element is read.
///
/// `[batch, seqlen, heads, dim]`, or `[total, heads, dim]` of a packed batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View<'a> {
    /// Type of its elements.
    pub dtype: Dtype,
    /// The extent of each dimension.
    pub shape: &'a [usize],
    /// From one index to the next in each dimension, in elements.
    pub strides: &'a [i64],
    /// Its first element, in the memory that kernels see.
    pub address: u64,
}

/// A layout that no call can have.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// A tensor that is not the problem's, or whose last dimension is not contiguous.
    #[error(transparent)]
    Input(#[from] InputError),
    /// Fewer or more strides than dimensions.
    #[error("{argument} has {strides} strides: its shape has {dimensions} dimensions")]
    Rank {
        /// Which tensor.
        argument: &'static str,
        /// Strides given.
        strides: usize,
        /// Dimensions given.
        dimensions: usize,
    },
    /// A stride that goes backwards.
    #[error("{argument} has stride {stride} in dimension {dimension}: strides must be at least 0")]
    Negative {
        /// Which tensor.
        argument: &'static str,
        /// The dimension.
        dimension: usize,
        /// Its stride.
        stride: i64,
    },
    /// Rows of the output that are the same memory.
    #[error(
        "out has stride {stride} between {dimension}, whose rows of {row} elements then overlap: each must have its own"
    )]
    Overlap {
        /// Between what.
        dimension: &'static str,
        /// Elements.
        stride: usize,
        /// Elements of a row.
        row: usize,
    },
    /// An alignment that addresses of elements cannot have.
    #[error("alignment is {alignment}: it must be a power of two, at least the {least} bytes of an element")]
    Alignment {
        /// What it is.
        alignment: u64,
        /// The least.
        least: u64,
    },
    /// A tensor that begins inside an element.
    #[error("{argument} is at address {address:#x}: it must be a multiple of the {least} bytes of an element")]
    Address {
        /// Which tensor.
        argument: &'static str,
        /// Where it begins.
        address: u64,
        /// Bytes of an element.
        least: u64,
    },
    /// A tensor that ends past every address.
    #[error("{argument} reaches over {bytes} bytes: the most is {}", i64::MAX)]
    Size {
        /// Which tensor.
        argument: &'static str,
        /// Over how many.
        bytes: u128,
    },
}

/// The layout of tensors that lie as described.
///
/// # Errors
/// When one is not of the problem's type or shape, its last dimension is not contiguous, or rows of `out` overlap.
pub fn layout(
    problem: &Problem,
    q: &View<'_>,
    k: &View<'_>,
    v: &View<'_>,
    out: &View<'_>,
) -> Result<Layout, LayoutError> {
    let mut layout = Layout::contiguous(problem);
    let views = [
        ("q", q, problem.q_shape(), &mut layout.q),
        ("k", k, problem.k_shape(), &mut layout.k),
        ("v", v, problem.v_shape(), &mut layout.v),
        ("out", out, problem.out_shape(), &mut layout.out),
    ];
    let mut addresses = 16;
    for (argument, view, expected, strides) in views {
        *strides = strides_of(argument, view, problem.dtype, expected)?;
        let (address, least) = (view.address, problem.dtype.bytes() as u64);
        if !address.is_multiple_of(least) {
            return Err(LayoutError::Address { argument, address, least });
        }
        addresses |= view.address;
    }
    layout.alignment = 1 << addresses.trailing_zeros();
    check(problem, &layout)?;
    Ok(layout)
}

/// A layout with the keys and values that are appended to the cache lying as described.
///
/// # Errors
/// When one is not of the problem's type or shape, or its last dimension is not contiguous.
pub fn appended(problem: &Problem, layout: Layout, k_new: &View<'_>, v_new: &View<'_>) -> Result<Layout, LayoutError> {
    let mut layout = layout;
    for (index, (argument, view)) in [("k_new", k_new), ("v_new", v_new)].into_iter().enumerate() {
        layout.new[index] = strides_of(argument, view, problem.dtype, shape(problem, argument))?;
        let (address, least) = (view.address, problem.dtype.bytes() as u64);
        if !address.is_multiple_of(least) {
            return Err(LayoutError::Address { argument, address, least });
        }
    }
    check(problem, &layout)?;
    Ok(layout)
}

fn strides_of(
    argument: &'static str,
    view: &View<'_>,
    dtype: Dtype,
    expected: Vec<usize>,
) -> Result<Strides, LayoutError> {
    if view.dtype != dtype {
        return Err(InputError::Dtype { argument, dtype: view.dtype, expected: dtype }.into());
    }
    if view.shape != expected {
        return Err(InputError::Shape { argument, shape: view.shape.to_vec(), expected }.into());
    }
    if view.strides.len() != view.shape.len() {
        return Err(LayoutError::Rank { argument, strides: view.strides.len(), dimensions: view.shape.len() });
    }
    let mut strides = Vec::new();
    for (dimension, &stride) in view.strides.iter().enumerate() {
        strides.push(usize::try_from(stride).map_err(|_| LayoutError::Negative { argument, dimension, stride })?);
    }
    let (batch, seq, head, last) = match strides[..] {
        [batch, seq, head, last] => (batch, seq, head, last),
        [seq, head, last] => (0, seq, head, last),
        _ => return Err(InputError::Shape { argument, shape: view.shape.to_vec(), expected }.into()),
    };
    if last != 1 && expected.last().is_some_and(|&dim| dim > 1) {
        return Err(InputError::LastStride { argument, stride: last }.into());
    }
    Ok(Strides { batch, seq, head })
}

/// What a layout must be for any stratum.
pub(crate) fn check(problem: &Problem, layout: &Layout) -> Result<(), LayoutError> {
    let least = problem.dtype.bytes() as u64;
    if !layout.alignment.is_power_of_two() || layout.alignment < least {
        return Err(LayoutError::Alignment { alignment: layout.alignment, least });
    }
    for argument in ["q", "k", "v", "out", "k_new", "v_new"] {
        let bytes = reach(problem, layout, argument);
        if bytes > i64::MAX as u128 {
            return Err(LayoutError::Size { argument, bytes });
        }
    }
    if reach(problem, layout, "out") == 0 {
        return Ok(());
    }
    // Sorted by stride, each dimension must step over all of those within it: then no two rows share an element.
    let (out, row) = (layout.out, problem.head_dim_v);
    let mut steps = vec![("tokens", out.seq, tokens(problem, "out")), ("heads", out.head, problem.heads_q)];
    if problem.varlen.is_none() {
        steps.push(("batch entries", out.batch, problem.batch));
    }
    if steps.iter().any(|&(_, _, extent)| extent == 0) {
        return Ok(());
    }
    steps.retain(|&(_, _, extent)| extent > 1);
    steps.sort_by_key(|&(_, stride, _)| stride);
    let mut within = row as u128;
    for (dimension, stride, extent) in steps {
        if (stride as u128) < within {
            return Err(LayoutError::Overlap { dimension, stride, row });
        }
        within += stride as u128 * (extent as u128 - 1);
    }
    Ok(())
}

/// Tokens along the dimension of the sequence of a tensor: of all entries where they are packed.
fn tokens(problem: &Problem, argument: &str) -> usize {
    let shape = shape(problem, argument);
    shape[shape.len() - 3]
}

/// The shape of a tensor of attention, of at least three dimensions.
fn shape(problem: &Problem, argument: &str) -> Vec<usize> {
    let appended = problem.cache.as_ref().map_or(0, Cache::appended);
    let new = |dim| vec![problem.batch, appended, problem.heads_kv, dim];
    match argument {
        "q" => problem.q_shape(),
        "k" => problem.k_shape(),
        "v" => problem.v_shape(),
        "k_new" => new(problem.head_dim),
        "v_new" => new(problem.head_dim_v),
        _ => problem.out_shape(),
    }
}

/// Bytes of `lse`.
pub(crate) fn lse_bytes(problem: &Problem) -> u64 {
    4 * problem.total_q() as u64 * problem.heads_q as u64
}

/// The bytes from a tensor's first element to the end of its last; 0 where it has none.
pub(crate) fn reach(problem: &Problem, layout: &Layout, argument: &str) -> u128 {
    let strides = match argument {
        "q" => layout.q,
        "k" => layout.k,
        "v" => layout.v,
        "k_new" => layout.new[0],
        "v_new" => layout.new[1],
        _ => layout.out,
    };
    let (batch, seqlen, heads, dim) = match shape(problem, argument)[..] {
        [batch, seqlen, heads, dim] => (batch, seqlen, heads, dim),
        [seqlen, heads, dim] => (1, seqlen, heads, dim),
        _ => return 0,
    };
    let steps = [(strides.batch, batch), (strides.seq, seqlen), (strides.head, heads)];
    if steps.iter().any(|&(_, extent)| extent == 0) {
        return 0;
    }
    let last: u128 = steps.iter().map(|&(stride, extent)| stride as u128 * (extent as u128 - 1)).sum();
    (last + dim as u128) * problem.dtype.bytes() as u128
}

#[cfg(test)]
mod tests {
    use kernels::ProblemSpec;

    use super::*;

    #[test]
    fn views_that_do_not_fit_are_named() {
        let problem = ProblemSpec::new(2, 4, 8, 16).heads_kv(2).dtype(Dtype::F16).build().unwrap();
        let q = View { dtype: Dtype::F16, shape: &[2, 8, 4, 16], strides: &[512, 64, 16, 1], address: 256 };
        let k = View { dtype: Dtype::F16, shape: &[2, 8, 2, 16], strides: &[256, 32, 16, 1], address: 4096 };
        let right = layout(&problem, &q, &k, &k, &q).unwrap();
        assert_eq!(right, Layout::contiguous(&problem));
        // A head that is expanded, and a storage that begins in between.
        let expanded = View { strides: &[256, 32, 0, 1], address: 4098, ..k };
        let found = layout(&problem, &q, &expanded, &k, &q).unwrap();
        assert_eq!((found.k.head, found.alignment), (0, 2));
        let wrong = [
            layout(&problem, &View { dtype: Dtype::Bf16, ..q }, &k, &k, &q),
            layout(&problem, &q, &View { shape: &[2, 8, 3, 16], ..k }, &k, &q),
            layout(&problem, &q, &k, &View { shape: &[2, 7, 2, 16], ..k }, &q),
            layout(&problem, &q, &k, &View { strides: &[256, 32, 1, 2], ..k }, &q),
            layout(&problem, &q, &View { strides: &[256, -32, 16, 1], ..k }, &k, &q),
            layout(&problem, &q, &View { strides: &[32, 16, 1], ..k }, &k, &q),
            layout(&problem, &q, &k, &k, &View { strides: &[512, 64, 0, 1], ..q }),
            layout(&problem, &q, &k, &k, &View { strides: &[512, 16, 15, 1], ..q }),
            layout(&problem, &View { address: 257, ..q }, &k, &k, &q),
            layout(&problem, &q, &View { strides: &[i64::MAX, 32, 16, 1], ..k }, &k, &q),
        ];
        let aligned = Layout { alignment: 3, ..Layout::contiguous(&problem) };
        assert!(
            check(&problem, &aligned).unwrap_err().to_string().starts_with("alignment is 3: it must be a power of two")
        );
        insta::assert_snapshot!(wrong.map(|result| result.unwrap_err().to_string()).join("\n"));
    }

    #[test]
    fn a_tensor_reaches_to_its_last_element() {
        let problem = ProblemSpec::new(2, 4, 8, 16).dtype(Dtype::F16).build().unwrap();
        let layout = Layout::contiguous(&problem);
        assert_eq!(reach(&problem, &layout, "q"), 2 * 4 * 8 * 16 * 2);
        let packed = ProblemSpec::packed(3, 4, vec![0, 2, 2, 7], vec![0, 1, 3, 4]).build().unwrap();
        let layout = Layout::contiguous(&packed);
        assert_eq!((reach(&packed, &layout, "q"), reach(&packed, &layout, "v")), (7 * 3 * 4 * 4, 4 * 3 * 4 * 4));
        // Without queries no row can overlap another, whatever the strides.
        let empty = ProblemSpec::new(2, 4, 0, 16).build().unwrap();
        assert_eq!(reach(&empty, &Layout::contiguous(&empty), "k"), 0);
        assert_eq!(check(&empty, &Layout::contiguous(&empty)), Ok(()));
    }
}
