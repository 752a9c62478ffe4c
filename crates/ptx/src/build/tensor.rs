//! Matrix instructions, asynchronous copies and the barriers they complete on.

use super::*;

const TENSOR_MAP_BYTES: u64 = 128;
const TENSOR_MAP_ALIGNMENT: u32 = 64;

/// A kernel parameter that is a tensor map (128 bytes that the back end makes).
#[derive(Clone, Copy, Debug)]
pub struct TensorMapParam {
    /// Its generic address.
    address: Register,
}

/// How the right factor of a product lies in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Along {
    /// Each column's elements along the inner dimension follow each other: the rows of its transpose.
    Rows,
    /// Each inner index's elements follow each other, column after column.
    Columns,
}

impl<S> Pointer<S> {
    fn memory(self) -> Operand {
        Operand::Memory(self.address)
    }
}

fn registers<T>(registers: &[Reg<T>]) -> Operand {
    Operand::Vector(registers.iter().map(|reg| reg.register.into()).collect())
}

impl KernelBuilder {
    /// Emits a form by the names of its modifiers, as the table writes them; with a name that is none, it is no form.
    #[track_caller]
    fn emit_named(&mut self, opcode: Opcode, names: &str, operands: Vec<Operand>) {
        let modifiers: Vec<_> = names.split_whitespace().filter_map(Modifier::from_name).collect();
        self.emit(opcode, &[&modifiers], operands);
    }

    // ---- matrices in registers

    /// `d += a x b` of a warp, 16 rows by 8 columns: `a` and `b` are of the type `ty`, of 16 bits, two to a register, or tf32.
    /// Four registers of `a` are 32 bytes deep, two 16 (`mma.m16n8k16` on sm_80, `mma.m16n8k8` on sm_75).
    #[track_caller]
    pub fn mma(&mut self, d: &[Reg<F32>], a: &[Reg<B32>], b: &[Reg<B32>], ty: Type) {
        let depth = 64 * a.len() as u32 / ty.bits().max(1);
        let names = format!("sync aligned m16n8k{depth} row col f32 {} {} f32", ty.name(), ty.name());
        self.emit_named(Opcode::Mma, &names, vec![registers(d), registers(a), registers(b), registers(d)]);
    }

    /// One, two or four 8x8 matrices of 16-bit elements, one register each. Lane `i` gives the address of row `i mod 8` of
    /// matrix `i / 8`, a multiple of 16.
    #[track_caller]
    pub fn ldmatrix(&mut self, count: usize, from: Pointer<Shared>, transposed: bool) -> Vec<Reg<B32>> {
        let d = self.regs(count);
        let trans = if transposed { "trans" } else { "" };
        let operand = if count == 1 { d[0].register.into() } else { registers(&d) };
        let names = format!("sync aligned m8n8 x{count} {trans} shared b16");
        self.emit_named(Opcode::Ldmatrix, &names, vec![operand, from.memory()]);
        d
    }

    /// Stores one, two or four 8x8 matrices of 16-bit elements, one register each. Lane `i` gives the address of row `i mod 8`
    /// of matrix `i / 8`, a multiple of 16 (sm_90).
    #[track_caller]
    pub fn stmatrix(&mut self, to: Pointer<Shared>, a: &[Reg<B32>]) {
        let operand = if let [one] = a { one.register.into() } else { registers(a) };
        let names = format!("sync aligned m8n8 x{} shared b16", a.len());
        self.emit_named(Opcode::Stmatrix, &names, vec![to.memory(), operand]);
    }

    // ---- matrices in shared memory

    /// Before the first matrix instruction of a warpgroup, and after its registers were written (PTX ISA, `wgmma.fence`).
    #[track_caller]
    pub fn wgmma_fence(&mut self) {
        self.emit_named(Opcode::Wgmma, "fence sync aligned", Vec::new());
    }

    /// The matrix instructions since the last commit become a group.
    #[track_caller]
    pub fn wgmma_commit(&mut self) {
        self.emit_named(Opcode::Wgmma, "commit_group sync aligned", Vec::new());
    }

    /// Waits until at most `pending` groups are under way.
    #[track_caller]
    pub fn wgmma_wait(&mut self, pending: u32) {
        self.emit_named(Opcode::Wgmma, "wait_group sync aligned", vec![Operand::Integer(pending.into())]);
    }

    /// `d = a x b^T`, plus `d` where `accumulate` holds, of a warpgroup: 64 rows, twice as many columns as `d` has registers.
    /// Both are described by matrix descriptors, rows along the inner dimension, which is 32 bytes long.
    #[track_caller]
    pub fn wgmma_shared(&mut self, d: &[Reg<F32>], a: Reg<U64>, b: Reg<U64>, accumulate: Reg<Pred>, ty: Type) {
        let operands = vec![registers(d), a.register.into(), b.register.into(), accumulate.register.into()];
        self.emit_wgmma(ty, d, operands, &[Along::Rows, Along::Rows]);
    }

    /// `d += a x b` of a warpgroup: 64 rows, twice as many columns as `d` has registers. `a` is in registers (fragment A),
    /// 32 bytes deep, `b` is described by a matrix descriptor. Only 16-bit types may lie with columns along the inner dimension.
    #[track_caller]
    pub fn wgmma_registers(
        &mut self,
        d: &[Reg<F32>],
        a: &[Reg<B32>],
        b: (Reg<U64>, Along),
        accumulate: Reg<Pred>,
        ty: Type,
    ) {
        let operands = vec![registers(d), registers(a), b.0.register.into(), accumulate.register.into()];
        self.emit_wgmma(ty, d, operands, &[b.1]);
    }

    /// Adds the signs of both factors and, of 16-bit types, how each one in shared memory lies.
    #[track_caller]
    fn emit_wgmma(&mut self, ty: Type, d: &[Reg<F32>], mut operands: Vec<Operand>, factors: &[Along]) {
        operands.extend([Operand::Integer(1), Operand::Integer(1)]);
        let (columns, depth) = (2 * d.len(), 256 / ty.bits());
        if ty.bits() == 16 {
            operands.extend(factors.iter().map(|&along| Operand::Integer((along == Along::Columns).into())));
        }
        let names = format!("mma_async sync aligned m64n{columns}k{depth} f32 {} {}", ty.name(), ty.name());
        self.emit_named(Opcode::Wgmma, &names, operands);
    }

    // ---- asynchronous copies

    /// Copies `bytes`, 4, 8 or 16, from global to shared memory while the thread goes on, past the first-level cache where it
    /// can; only the first `read` of them are read, the rest become 0. Ends with [`KernelBuilder::cp_async_wait`].
    #[track_caller]
    pub fn cp_async(&mut self, to: Pointer<Shared>, from: Pointer<Global>, bytes: u32, read: impl Into<Src<U32>>) {
        let operands = vec![to.memory(), from.memory(), Operand::Integer(bytes.into()), read.into().operand];
        let names = if bytes == 16 { "async cg shared global" } else { "async ca shared global" };
        self.emit_named(Opcode::CpAsync, names, operands);
    }

    /// This thread's copies since the last commit become a group.
    #[track_caller]
    pub fn cp_async_commit(&mut self) {
        self.emit_named(Opcode::CpAsync, "async commit_group", Vec::new());
    }

    /// Waits until at most `pending` of this thread's groups are under way.
    #[track_caller]
    pub fn cp_async_wait(&mut self, pending: u32) {
        self.emit_named(Opcode::CpAsync, "async wait_group", vec![Operand::Integer(pending.into())]);
    }

    /// Declares the next parameter as a tensor map.
    #[track_caller]
    pub fn tensor_map_param(&mut self, name: &str) -> TensorMapParam {
        self.kernel.params.push(ParameterDecl {
            name: name.into(),
            ty: Type::B8,
            elements: Some(TENSOR_MAP_BYTES),
            align: Some(TENSOR_MAP_ALIGNMENT),
            pointee: None,
        });
        let place = Parameter(self.kernel.params.len() as u32 - 1);
        let (inside, generic) = (self.reg::<U64>(), self.reg::<U64>());
        self.emit_named(Opcode::Mov, "b64", vec![inside.register.into(), Operand::ParameterAddress(place, 0)]);
        self.emit_named(Opcode::Cvta, "param u64", vec![generic.register.into(), inside.register.into()]);
        TensorMapParam { address: generic.register }
    }

    /// Has the copy engine bring the box of a tensor at the coordinates, the innermost first, to shared memory. Its bytes
    /// complete on the barrier. One thread issues it for all.
    #[track_caller]
    pub fn tensor_load(
        &mut self,
        to: Pointer<Shared>,
        map: TensorMapParam,
        coordinates: &[Reg<S32>],
        barrier: Pointer<Shared>,
    ) {
        self.emit_tensor_load(to, (map, coordinates), barrier, None);
    }

    /// The same for every CTA of the cluster whose bit is in `ctas`: the bytes come to the same place of each one's shared memory and
    /// complete on the barrier at the same place there (sm_90).
    #[track_caller]
    pub fn tensor_load_to_ctas(
        &mut self,
        to: Pointer<Shared>,
        map: TensorMapParam,
        coordinates: &[Reg<S32>],
        barrier: Pointer<Shared>,
        ctas: u16,
    ) {
        self.emit_tensor_load(to, (map, coordinates), barrier, Some(ctas));
    }

    #[track_caller]
    fn emit_tensor_load(
        &mut self,
        to: Pointer<Shared>,
        (map, coordinates): (TensorMapParam, &[Reg<S32>]),
        barrier: Pointer<Shared>,
        ctas: Option<u16>,
    ) {
        let at = Address { base: Base::Register(map.address), offset: 0 };
        let element = Operand::Tensor(at, coordinates.iter().map(|reg| reg.register.into()).collect());
        let rank = coordinates.len();
        let multicast = if ctas.is_some() { "multicast::cluster" } else { "" };
        let names =
            format!("async bulk tensor {rank}d shared::cluster global tile mbarrier::complete_tx::bytes {multicast}");
        let mut operands = vec![to.memory(), element, barrier.memory()];
        operands.extend(ctas.map(|ctas| Operand::Integer(ctas.into())));
        self.emit_named(Opcode::CpAsync, &names, operands);
    }

    // ---- barriers in shared memory

    /// A barrier for `count` arrivals.
    #[track_caller]
    pub fn mbarrier_init(&mut self, barrier: Pointer<Shared>, count: u32) {
        let operands = vec![barrier.memory(), Operand::Integer(count.into())];
        self.emit_named(Opcode::Mbarrier, "init shared b64", operands);
    }

    /// Makes barriers visible to the copy engine and to the other CTAs of the cluster.
    #[track_caller]
    pub fn fence_mbarrier_init(&mut self) {
        self.emit_named(Opcode::Fence, "mbarrier_init release cluster", Vec::new());
        self.fence_proxy_async();
    }

    /// What this thread wrote to shared memory becomes visible to the copy engine and to matrix instructions.
    #[track_caller]
    pub fn fence_proxy_async(&mut self) {
        self.emit_named(Opcode::Fence, "proxy async shared::cta", Vec::new());
    }

    /// Arrives.
    #[track_caller]
    pub fn mbarrier_arrive(&mut self, barrier: Pointer<Shared>) {
        self.emit_named(Opcode::Mbarrier, "arrive shared::cta b64", vec![Operand::Sink, barrier.memory()]);
    }

    /// Arrives, and has the phase wait for so many bytes of copies.
    #[track_caller]
    pub fn mbarrier_arrive_expect(&mut self, barrier: Pointer<Shared>, bytes: u32) {
        let operands = vec![Operand::Sink, barrier.memory(), Operand::Integer(bytes.into())];
        self.emit_named(Opcode::Mbarrier, "arrive expect_tx shared::cta b64", operands);
    }

    /// Arrives at a barrier of a CTA of the cluster, when what was read or copied has come. Not for what this thread wrote: that
    /// would take a release at the cluster's scope, which waits for all its stores.
    #[track_caller]
    pub fn mbarrier_arrive_in_cluster(&mut self, barrier: Pointer<SharedCluster>) {
        self.emit_named(Opcode::Mbarrier, "arrive shared::cluster b64", vec![Operand::Sink, barrier.memory()]);
    }

    /// Waits until the phase of this parity has completed.
    #[track_caller]
    pub fn mbarrier_wait(&mut self, barrier: Pointer<Shared>, parity: Reg<U32>) {
        self.at(panic::Location::caller(), |k| {
            let (again, done) = (k.label(), k.reg::<Pred>());
            k.place(again);
            let operands = vec![done.register.into(), barrier.memory(), parity.register.into()];
            k.emit_named(Opcode::Mbarrier, "try_wait parity shared::cta b64", operands);
            k.bra_if(!done, again);
        });
    }

    /// Arrives at barrier `id`, of `threads` threads, without waiting.
    #[track_caller]
    pub fn bar_arrive(&mut self, id: impl Into<Src<U32>>, threads: u32) {
        self.emit(Opcode::Bar, &[&[Modifier::Arrive]], vec![id.into().operand, Operand::Integer(threads.into())]);
    }

    /// Takes registers from the CTA's pool until each thread of the warpgroup has so many, a multiple of 8 from 24 to 256.
    #[track_caller]
    pub fn more_registers(&mut self, count: u32) {
        self.emit_named(Opcode::Setmaxnreg, "inc sync aligned u32", vec![Operand::Integer(count.into())]);
    }

    /// Gives registers back to the CTA's pool until each thread of the warpgroup has so many, a multiple of 8 from 24 to 256.
    #[track_caller]
    pub fn fewer_registers(&mut self, count: u32) {
        self.emit_named(Opcode::Setmaxnreg, "dec sync aligned u32", vec![Operand::Integer(count.into())]);
    }

    /// Adds to a number in global memory and returns what it was.
    #[track_caller]
    pub fn atomic_add(&mut self, at: Pointer<Global>, value: impl Into<Src<U32>>) -> Reg<U32> {
        let d = self.reg::<U32>();
        self.emit_named(Opcode::Atom, "global add u32", vec![d.register.into(), at.memory(), value.into().operand]);
        d
    }

    /// Counts a number in global memory up, from `most` back to 0, and returns what it was.
    #[track_caller]
    pub fn atomic_inc(&mut self, at: Pointer<Global>, most: impl Into<Src<U32>>) -> Reg<U32> {
        let d = self.reg::<U32>();
        self.emit_named(Opcode::Atom, "global inc u32", vec![d.register.into(), at.memory(), most.into().operand]);
        d
    }

    // ---- clusters

    /// Where the CTA of a rank in the cluster has what this one has at `address` of shared memory (sm_90).
    #[track_caller]
    pub fn address_in_cta(&mut self, address: Reg<U32>, rank: u32) -> Reg<U32> {
        let d = self.reg::<U32>();
        let operands = vec![d.register.into(), address.register.into(), Operand::Integer(rank.into())];
        self.emit_named(Opcode::Mapa, "shared::cluster u32", operands);
        d
    }

    /// Waits until every thread of the cluster is here; what each has written before, the others see then (sm_90).
    #[track_caller]
    pub fn cluster_sync(&mut self) {
        self.emit_named(Opcode::Barrier, "cluster arrive release", Vec::new());
        self.emit_named(Opcode::Barrier, "cluster wait acquire", Vec::new());
    }
}
