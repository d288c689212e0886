"""D4RL's normalised score: 100 times how far a mean return is from random play (0) to an expert's (100).

The returns of random play and of the expert are those of D4RL's own environments, with mujoco-py 2. Today's gymnasium
environments of the same names have other physics (contacts, solver) and may end episodes otherwise: a score got in them
is close to, and not the same as, one of the literature.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipelines.errors import UsageError
from pipelines.nearest import did_you_mean

# Task -> mean return of random play, and of the expert.
REFERENCES: dict[str, tuple[float, float]] = {
    "halfcheetah": (-280.178953, 12135.0),
    "hopper": (-20.272305, 3234.3),
    "walker2d": (1.629008, 4592.3),
    "ant": (-325.6, 3879.7),
    "antmaze": (0.0, 1.0),
    "kitchen": (0.0, 4.0),
    "pen": (96.262799, 3076.8331017826877),
    "hammer": (-274.856578, 12794.134825156867),
    "door": (-56.512833, 2880.5693087298737),
    "relocate": (-6.425911, 4233.877797728884),
    "maze2d-open-v0": (0.01, 20.66),
    "maze2d-umaze-v1": (23.85, 161.86),
    "maze2d-medium-v1": (13.13, 277.39),
    "maze2d-large-v1": (6.7, 273.99),
    "maze2d-open-dense-v0": (11.17817, 27.166538620695782),
    "maze2d-umaze-dense-v1": (68.537689, 193.66285642381482),
    "maze2d-medium-dense-v1": (44.264742, 297.4552547777125),
    "maze2d-large-dense-v1": (30.569041, 303.4857382709002),
    "minigrid-fourrooms": (0.01442, 2.89685),
}
# Environments of today whose task and observations are those of a task of D4RL.
_TODAY = re.compile(
    r"(?:gym|robotics|gym:gymnasium_robotics):(?:(?:HalfCheetah|Hopper|Walker2d)-v[45]|AdroitHand(?:Pen|Hammer|Door|Relocate)-v\d+|AntMaze_\w+-v[34])"
)
_ADROIT = "adroithand"


@dataclass(frozen=True)
class Reference:
    """A task of D4RL, with the returns between which scores lie."""

    task: str
    low: float
    high: float

    def score(self, mean_return: float) -> float:
        """Normalise a mean return.

        >>> reference("hopper-medium-v2").score(3234.3)
        100.0
        """
        return 100 * (mean_return - self.low) / (self.high - self.low)

    @classmethod
    def find(cls, name: str) -> Reference:
        """Return the reference of a task or a dataset of D4RL, e.g. "hopper-medium-v2". UsageError if there is none."""
        found = Reference._match(name)
        if found is None:
            hint = did_you_mean(name, REFERENCES, otherwise=f"known: {', '.join(REFERENCES)}")
            raise UsageError(f"D4RL has no task '{name}'", hint=hint)
        return found

    @classmethod
    def of_environment(cls, name: str, *, continuing: bool = True) -> Reference | None:
        """Return the reference of the D4RL task that the environment `name` plays; None if it plays none of them.

        D4RL's AntMaze ends at the goal and pays 1; one that goes on there (`continuing`) pays 1 a step, without limit.
        """
        if _TODAY.fullmatch(name) is None:
            return None
        task = name.rpartition(":")[2].partition("-")[0].partition("_")[0].lower().removeprefix(_ADROIT)
        return None if task == "antmaze" and continuing else Reference._match(task)

    @classmethod
    def _match(cls, name: str) -> Reference | None:
        fits = [task for task in REFERENCES if name == task or name.startswith(f"{task}-")]
        task = max(fits, key=len, default=None)
        return None if task is None else cls(task, *REFERENCES[task])
