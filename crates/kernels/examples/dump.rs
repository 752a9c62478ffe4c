//! scratch: dump the kernels of the set whose name contains an argument
fn main() {
    let want = std::env::args().nth(1).unwrap_or_default();
    let out = std::env::args().nth(2).unwrap();
    for (name, program) in kernels::configurations::configurations().unwrap() {
        if name.contains(&want) {
            std::fs::write(format!("{out}/{}.ptx", name.replace('/', "__")), program.kernel.to_string()).unwrap();
            println!("{name} shared {} min_ctas {:?}", program.shared.bytes(), program.kernel.min_ctas_per_sm);
        }
    }
    let spec = std::env::args().nth(3);
    if let Some(spec) = spec {
        let mut tiles = std::env::args().nth(4).unwrap_or_default().split(',').filter_map(|x| x.parse().ok()).collect::<Vec<u32>>();
        let problem: kernels::Problem = spec.parse().unwrap();
        let target: ptx::Target = std::env::args().nth(5).unwrap_or("sm_90a".into()).parse().unwrap();
        let tiles = (tiles.len() == 3).then(|| kernels::Tiles { threads: tiles.pop().unwrap(), block_kv: tiles.pop().unwrap(), block_q: tiles.pop().unwrap() });
        let plan = kernels::plan(kernels::Stratum::V2Tc, &problem, target, &kernels::Layout::contiguous(&problem), tiles).unwrap();
        for l in plan.launches {
            std::fs::write(format!("{out}/plan.ptx"), l.kernel.to_string()).unwrap();
            println!("{} shared {} min_ctas {:?} tiles {:?}", l.kernel.name, l.dynamic_shared, l.kernel.min_ctas_per_sm, plan.config.tiles);
        }
    }
}
