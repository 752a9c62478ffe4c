//! The f64 reference and the plain algorithm: one head of 1024 queries by 1024 keys at head_dim 64.

use criterion::{Criterion, criterion_group, criterion_main};
use kernels::{Dtype, Inputs, Problem, plain, reference};

fn one_head(criterion: &mut Criterion) {
    let problem = Problem::builder(1, 1, 1024, 64).dtype(Dtype::F16).build().expect("an allowed problem");
    let inputs = Inputs::randn(&problem, 1).expect("memory for one head");
    let mut group = criterion.benchmark_group("1x1x1024x64");
    group.sample_size(20);
    group.bench_function("reference", |bencher| bencher.iter(|| reference(&problem, &inputs)));
    group.bench_function("plain", |bencher| bencher.iter(|| plain(&problem, &inputs)));
    group.finish();
}

criterion_group!(benches, one_head);
criterion_main!(benches);
