use std::collections::BTreeMap;
fn main() {
    let (mut ok, mut n, mut perr) = (0, 0, 0);
    for f in std::env::args().skip(1) {
        let t = std::fs::read_to_string(&f).unwrap();
        let want = t.lines().next().unwrap()[3..].to_string();
        let kernels = match ptx::parse(&t) { Ok(k) => k, Err(e) => { perr += 1; if perr < 12 { println!("{f}: {e}"); } continue } };
        let k = &kernels[0];
        let ins: Vec<_> = k.instructions().collect();
        let mut c: BTreeMap<String, u32> = BTreeMap::new();
        for g in emulator::merge::groups(k) {
            let i = ins[g.leader];
            let shared = i.has(ptx::Modifier::Shared);
            if !shared { continue }
            let name = if i.opcode() == ptx::Opcode::Ld { "LDS" } else { "STS" };
            let w = match g.bytes_per_lane { 16 => ".128", 8 => ".64", 4 => "", 2 => "16", _ => "8" };
            *c.entry(format!("{name}{w}")).or_default() += 1;
        }
        let got = c.iter().map(|(k, v)| format!("{k}x{v}")).collect::<Vec<_>>().join(" ");
        n += 1;
        if got == want { ok += 1 } else { println!("{} | pred {got} | act {want}", f.rsplit('/').next().unwrap()) }
    }
    println!("{ok}/{n} parse errors {perr}");
}
