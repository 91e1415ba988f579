"""Fits of measured times by the few parameters that a profile keeps."""

from collections.abc import Sequence

from kvrs.profiles.schema import TransferTime


def fit_transfer(points: Sequence[tuple[int, float]]) -> TransferTime:
    """`alpha + bytes / rate` through (bytes, seconds), by least relative squares, so that short
    transfers count too.

    Where noise would make either of them negative, the rate is that of the largest transfer and the
    start is free.
    """
    assert points, "at least one transfer was timed"
    largest, longest_s = max(points)
    weights = [1.0 / max(seconds, 1e-9) ** 2 for _, seconds in points]
    total = sum(weights)
    mean_bytes = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    mean_s = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(w * (size - mean_bytes) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    if spread > 0:
        slope = (
            sum(
                w * (size - mean_bytes) * (seconds - mean_s)
                for w, (size, seconds) in zip(weights, points, strict=True)
            )
            / spread
        )
        alpha_s = mean_s - slope * mean_bytes
        if slope > 0 and alpha_s >= 0:
            return TransferTime(alpha_s=alpha_s, bytes_per_s=1 / slope)
    return TransferTime(alpha_s=0.0, bytes_per_s=largest / max(longest_s, 1e-9))
