"""What a fit shows and whom it calls after every round: `verbose` and `callbacks`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from treaty.errors import ConfigError
from treaty.machine.kernels import KernelCache
from treaty.models.trees import ModelPart
from treaty.trees.growth import NoMoreTrees


class Watch:
    """Call it after every round, or epoch, with how many are done and the active party's part, or losses by set.

    Routes are XGBoost's, ``[0]  eval_0-logloss:0.61``, of every round, or of every `verbose`-th. Callbacks have
    ``after_iteration(model, epoch, evals_log) -> bool``, as `xgboost.callback.TrainingCallback`.
    """

    def __init__(self, model: Any, verbose: bool | int) -> None:
        given = getattr(model, "callbacks", None) or []
        if not isinstance(given, list | tuple):
            raise ConfigError(f"expected callbacks in a list, got {type(given).__name__}")
        self._model, self._callbacks = model, list(given)
        if not isinstance(verbose, int | np.integer) or verbose < 0:
            raise ConfigError(
                f"expected verbose to be a bool, or after how many rounds a line is shown, got {verbose!r}"
            )
        if any(not callable(getattr(callback, "after_iteration", None)) for callback in self._callbacks):
            raise ConfigError("expected callbacks with a method after_iteration(model, epoch, evals_log)")
        if self._callbacks and model.transport == "grpc":
            raise ConfigError("callbacks are called in this process: they need transport='memory'")
        self._every, self._shown, self._begun = int(verbose), 0, False
        KernelCache.printed = self._every > 0
        self._tell("before_training")

    def __call__(self, done: int, part: Any) -> None:
        """Show the rounds since the last call; raise `NoMoreTrees` where a callback returns True.

        The first call is before the first round, or the first after those of a checkpoint.
        """
        history: Mapping[str, Mapping[str, list[float]]]
        if isinstance(part, ModelPart):
            assert part.forest is not None
            done, history = part.forest.rounds, part.forest.history
        else:
            history = {name: {"loss": of} for name, of in (part or {}).items()}
        for at in range(self._shown, done):
            if self._every and at % self._every == 0:
                print(_line(at, history), flush=True)
        begun, self._begun, self._shown = self._begun, True, max(self._shown, done)
        if not begun:
            return
        asked_to_stop = [callback.after_iteration(self._model, done - 1, history) for callback in self._callbacks]
        if any(asked_to_stop):
            raise NoMoreTrees

    def end(self) -> None:
        """Tell callbacks that training is over."""
        self._tell("after_training")

    def _tell(self, method: str) -> None:
        for callback in self._callbacks:
            if hasattr(callback, method):
                getattr(callback, method)(self._model)


def _line(at: int, history: Mapping[str, Mapping[str, list[float]]]) -> str:
    values = [
        f"{name}-{metric}:{of[at]:.5f}"
        for name, metrics in history.items()
        for metric, of in metrics.items()
        if at < len(of)
    ]
    return "\t".join([f"[{at}]", *values])
