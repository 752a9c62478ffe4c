//! Nsight Systems' SQLite export: the kernels on the timeline, alike ones together.

use std::path::Path;

use rusqlite::{Connection, OpenFlags};

use super::Raw;

const KERNELS: &str = "CUPTI_ACTIVITY_KIND_KERNEL";

/// Reads the kernels of an export.
pub(super) fn read(path: &Path) -> Result<Vec<Raw>, String> {
    let told = |error: rusqlite::Error| error.to_string();
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(told)?;
    let has = |table: &str| {
        let sql = "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = ?1";
        connection.query_row(sql, [table], |row| row.get::<_, u32>(0)).map(|count| count > 0)
    };
    // Both names are in use; other tables are made when there is something to put in.
    if !has("EXPORT_META_DATA").map_err(told)? && !has("META_DATA_EXPORT").map_err(told)? {
        return Err("it has no table EXPORT_META_DATA: it is another program's".into());
    }
    if !has(KERNELS).map_err(told)? {
        return Ok(Vec::new());
    }
    let gpus = if has("TARGET_INFO_GPU").map_err(told)? {
        "LEFT JOIN (SELECT id, name, computeMajor, computeMinor FROM TARGET_INFO_GPU) gpu ON gpu.id = k.deviceId"
    } else {
        "LEFT JOIN (SELECT NULL AS id, NULL AS name, NULL AS computeMajor, NULL AS computeMinor) gpu"
    };
    let sql = format!(
        "SELECT coalesce(names.value, 'kernel ' || k.shortName), gpu.name, gpu.computeMajor, gpu.computeMinor,
             k.gridX, k.gridY, k.gridZ, k.blockX, k.blockY, k.blockZ, k.registersPerThread,
             k.staticSharedMemory + k.dynamicSharedMemory, k.\"end\" - k.start
         FROM {KERNELS} k LEFT JOIN StringIds names ON names.id = k.shortName {gpus} ORDER BY k.start"
    );
    let mut statement = connection.prepare(&sql).map_err(told)?;
    let rows = statement.query_map([], |row| {
        let whole = |index: usize| row.get::<_, i64>(index).map(i64::unsigned_abs);
        let mut raw = Raw {
            kernel: row.get(0)?,
            gpu: row.get(1)?,
            capability: row.get::<_, Option<u32>>(2)?.zip(row.get::<_, Option<u32>>(3)?),
            grid: [whole(4)?, whole(5)?, whole(6)?],
            block: [whole(7)?, whole(8)?, whole(9)?],
            ..Raw::default()
        };
        raw.metrics.insert("launch__registers_per_thread".into(), whole(10)?.into());
        raw.metrics.insert("launch__shared_mem_per_block".into(), whole(11)?.into());
        Ok((raw, row.get::<_, i64>(12)? as f64 / 1e6))
    });
    let launches: Vec<(Raw, f64)> = rows.map_err(told)?.collect::<Result<_, _>>().map_err(told)?;
    together(launches)
}

/// Launches of one kernel on one grid as one, which takes their median.
pub(super) fn together(launches: Vec<(Raw, f64)>) -> Result<Vec<Raw>, String> {
    let mut kernels: Vec<(Raw, Vec<f64>)> = Vec::new();
    let mut known = std::collections::HashMap::new();
    for (raw, time_ms) in launches {
        if !(0.0..f64::INFINITY).contains(&time_ms) {
            return Err(format!("`{}` takes {time_ms} ms", raw.kernel));
        }
        let key = (raw.kernel.clone(), raw.gpu.clone(), raw.grid, raw.block);
        let index = *known.entry(key).or_insert(kernels.len());
        match kernels.get_mut(index) {
            Some((_, times)) => times.push(time_ms),
            None => kernels.push((raw, vec![time_ms])),
        }
    }
    let of = |(mut raw, mut times): (Raw, Vec<f64>)| {
        times.sort_by(f64::total_cmp);
        raw.samples = Some(times.len() as u64);
        raw.measured_time_ms = Some((times[(times.len() - 1) / 2] + times[times.len() / 2]) / 2.0);
        raw
    };
    Ok(kernels.into_iter().map(of).collect())
}
