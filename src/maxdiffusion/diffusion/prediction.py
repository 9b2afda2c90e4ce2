"""What a model predicts, and how each prediction becomes any other, given x = alpha x_0 + sigma eps.

- `epsilon`: eps (Ho et al. 2020)
- `sample`: x_0
- `v_prediction`: alpha eps - sigma x_0 (Salimans & Ho 2022, appendix D)
- `velocity`: eps - x_0, the derivative of x along the straight path of flow matching (Liu et al. 2022)

The last two determine (x_0, eps) at every noise level. `epsilon` leaves x_0 open where alpha = 0, and `sample` leaves
eps open where sigma = 0: there the open one is given as 0, and it carries no weight in x.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxdiffusion.diffusion.broadcast import over_batch
from maxdiffusion.errors import UsageError, nearest

Prediction = Literal["epsilon", "sample", "v_prediction", "velocity"]
PREDICTIONS: tuple[str, ...] = get_args(Prediction)


def check_prediction(prediction: str) -> None:
    """Refuse an unknown prediction type.

    Raises:
        UsageError: with the nearest name.
    """
    if prediction not in PREDICTIONS:
        raise UsageError(f"prediction {prediction!r}: {nearest(str(prediction), PREDICTIONS)}")


def to_x0_eps(
    output: Float[Array, "batch ..."],
    x: Float[Array, "batch ..."],
    alpha: Float[Array, "..."],
    sigma: Float[Array, "..."],
    *,
    prediction: Prediction,
) -> tuple[Float[Array, "batch ..."], Float[Array, "batch ..."]]:
    """The estimates (x_0, eps) that a model's output at x stands for.

    Args:
        output: the prediction, the shape of `x`.
        x: the noisy input.
        alpha: factor of the data, a scalar or (batch,), float32.
        sigma: factor of the noise, likewise.
        prediction: what `output` is.

    Returns:
        x_0 and eps, float32, with alpha x_0 + sigma eps = x.

    Raises:
        UsageError: an unknown prediction type.
    """
    check_prediction(prediction)
    output, x = output.astype(jnp.float32), x.astype(jnp.float32)
    alpha, sigma = over_batch(alpha, x), over_batch(sigma, x)
    if prediction == "epsilon":
        return _divide(x - sigma * output, alpha), output
    if prediction == "sample":
        return output, _divide(x - alpha * output, sigma)
    if prediction == "v_prediction":
        power = alpha**2 + sigma**2
        return (alpha * x - sigma * output) / power, (sigma * x + alpha * output) / power
    return (x - sigma * output) / (alpha + sigma), (x + alpha * output) / (alpha + sigma)


def from_x0_eps(
    x0: Float[Array, "batch ..."],
    eps: Float[Array, "batch ..."],
    alpha: Float[Array, "..."],
    sigma: Float[Array, "..."],
    *,
    prediction: Prediction,
) -> Float[Array, "batch ..."]:
    """What a model of this type predicts for data `x0` and noise `eps`: the target of training.

    Args:
        x0: clean data.
        eps: the noise, the shape of `x0`.
        alpha: factor of the data, a scalar or (batch,), float32.
        sigma: factor of the noise, likewise.
        prediction: what is wanted.

    Returns:
        float32, the shape of `x0`.

    Raises:
        UsageError: an unknown prediction type.
    """
    check_prediction(prediction)
    x0, eps = x0.astype(jnp.float32), eps.astype(jnp.float32)
    if prediction == "epsilon":
        return eps
    if prediction == "sample":
        return x0
    if prediction == "v_prediction":
        return over_batch(alpha, x0) * eps - over_batch(sigma, x0) * x0
    return eps - x0


def _divide(numerator: Float[Array, "batch ..."], by: Float[Array, "..."]) -> Float[Array, "batch ..."]:
    zero = by == 0
    return jnp.where(zero, 0.0, numerator / jnp.where(zero, 1.0, by))
