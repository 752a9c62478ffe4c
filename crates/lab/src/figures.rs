//! How figures are written for people.

/// `293,601,280`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (index, digit) in digits.char_indices() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `11.58 GB`: three or four figures, units of a thousand.
pub fn bytes(n: u64) -> String {
    let (mut value, mut unit) = (n as f64, "B");
    for larger in ["KB", "MB", "GB", "TB", "PB"] {
        if value < 999.95 {
            break;
        }
        (value, unit) = (value / 1000.0, larger);
    }
    match unit {
        "B" => format!("{n} B"),
        _ if value < 9.995 => format!("{value:.2} {unit}"),
        _ => format!("{value:.1} {unit}"),
    }
}

/// `4 MiB`, `99.5 KiB`: of memories whose sizes are powers of two.
pub fn binary_bytes(n: u64) -> String {
    let (value, unit) = if n >= 1 << 20 { (n as f64 / f64::from(1 << 20), "MiB") } else { (n as f64 / 1024.0, "KiB") };
    if value.fract() == 0.0 { format!("{value:.0} {unit}") } else { format!("{value:.1} {unit}") }
}

/// `166.5 ms`, `34.2 us`: three or four figures.
pub fn time(seconds: f64) -> String {
    let (value, unit) = if seconds >= 1e-3 || seconds == 0.0 { (seconds * 1e3, "ms") } else { (seconds * 1e6, "us") };
    format!("{} {unit}", figures(value))
}

/// `2.75x`, `31.8x`.
pub fn times(ratio: f64) -> String {
    format!("{}x", figures(ratio))
}

/// `63.6 %`, of a share between 0 and 1.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Three or four significant figures.
fn figures(value: f64) -> String {
    if value < 9.995 {
        format!("{value:.2}")
    } else if value < 999.95 {
        format!("{value:.1}")
    } else {
        format!("{value:.0}")
    }
}

/// `a`, `a and b`, `a, b and c`.
pub fn list<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    let mut items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    match items.pop() {
        None => String::new(),
        Some(last) if items.is_empty() => last,
        Some(last) => format!("{} and {last}", items.join(", ")),
    }
}

/// The quotient, 0 where there is nothing to divide by.
pub(crate) fn ratio(a: u64, b: u64) -> f64 {
    if b == 0 { 0.0 } else { a as f64 / b as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short_and_exact_enough() {
        assert_eq!(count(293_601_280), "293,601,280");
        assert_eq!((count(0), count(999), count(1000)), ("0".into(), "999".into(), "1,000".into()));
        assert_eq!(
            (bytes(999), bytes(11_580_000_000), bytes(503_316_480)),
            ("999 B".into(), "11.6 GB".into(), "503.3 MB".into())
        );
        assert_eq!((binary_bytes(4 << 20), binary_bytes(101_888)), ("4 MiB".into(), "99.5 KiB".into()));
        assert_eq!((time(0.1665), time(0.0), time(3.42e-5)), ("166.5 ms".into(), "0.00 ms".into(), "34.2 us".into()));
        assert_eq!((times(2.749), times(31.82), percent(0.6364)), ("2.75x".into(), "31.8x".into(), "63.6 %".into()));
        assert_eq!(list(["a", "b", "c"]), "a, b and c");
    }
}
