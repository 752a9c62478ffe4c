use kernels::*;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let dtype: Dtype = a[3].parse().unwrap();
    let d: u32 = a[4].parse().unwrap();
    let config = Config {
        target: a[1].parse().unwrap(),
        dtype,
        head_dim: d,
        head_dim_v: d,
        causal: a[6] == "1",
        vector: a[5].parse().unwrap(),
        tiles: Stratum::V2.default_tiles(),
    };
    let f = match &*a[2] {
        "v1" => v1::v1,
        "v2" => v2::v2,
        "v2_kt" => v2_kt::v2_kt,
        "scores" => naive::scores,
        "output" => naive::output,
        _ => v2_kt::transpose_keys,
    };
    print!("{}", f(&config).unwrap().kernel);
}
