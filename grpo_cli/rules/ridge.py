"""A linear function of what was read in a model, fitted in closed form: the same rows give the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

RidgeHead = Callable[[Float[np.ndarray, "R F"]], Float[np.ndarray, "R"]]  # of features: what is predicted of each row
WIDTH = 256  # directions of wider states that are used, so that a fit takes some 20 milliseconds whatever their width


def narrowed(states: Float[np.ndarray, "N H"]) -> Float[np.ndarray, "N F"]:
    """Return at most `WIDTH` directions of them, fixed random ones where they are wider."""
    if states.shape[1] <= WIDTH:
        return states
    # Drawn in float64 from a fixed seed, so every run and every resumed run has the same directions.
    directions = np.random.default_rng(0).standard_normal((states.shape[1], WIDTH))
    return states @ directions / states.shape[1] ** 0.5


def fit_ridge(
    features: Float[np.ndarray, "N F"], targets: Float[np.ndarray, "N"], shrinkages: Float[np.ndarray, "S"]
) -> RidgeHead:
    """Fit a ridge regression whose shrinkage (a share of N) has the least generalised cross-validation error.

    Golub, Heath and Wahba 1979: residual sum / (1 - degrees of freedom / N) ** 2, from one eigendecomposition.
    """
    count = len(targets)
    centre, spread = features.mean(axis=0), features.std(axis=0)
    scale = np.where(spread > 1e-9 * np.maximum(1.0, np.abs(centre)), spread, np.inf)  # a constant feature is ignored
    standard = (features - centre) / scale
    offset = float(targets.mean())
    values, vectors = np.linalg.eigh(standard.T @ standard)
    values = np.maximum(values, 0.0)
    projected = vectors.T @ (standard.T @ (targets - offset))
    total = float(((targets - offset) ** 2).sum())
    errors = []
    for shrinkage in shrinkages * count:
        explained = (projected**2 * (values + 2 * shrinkage) / (values + shrinkage) ** 2).sum()
        freedom = 1 + (values / (values + shrinkage)).sum()
        errors.append(max(total - explained, 0.0) / max(1 - freedom / count, 1e-9) ** 2)
    best = count * shrinkages[int(np.argmin(errors))]
    weights = vectors @ (projected / (values + best))
    return lambda rows: (rows - centre) / scale @ weights + offset
