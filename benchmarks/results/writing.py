"""How numbers are written in tables: no more digits than a measurement has. Knows nothing of what they count."""

MIB = 1 << 20


def write_number(value: float) -> str:
    """Three significant digits, whole numbers with separators: 0.512, 9.87, 48.1, 1,234."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def write_seconds(value: float) -> str:
    return f"{write_number(value)} s"


def write_ratio(value: float) -> str:
    return f"{value:.2f}×"


def write_share(value: float) -> str:
    """One decimal, or two below one percent: 41.3%, 0.07%."""
    return f"{value:.1%}" if abs(value) >= 0.01 else f"{value:.2%}"


def write_mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / MIB:,.0f} MiB"


def write_cosine(value: float) -> str:
    """Six places: 0.9999 and 0.99995 must not read alike."""
    return f"{value:.6f}"
