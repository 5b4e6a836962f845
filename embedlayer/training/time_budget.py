"""How many steps fit into a wall-clock time, measured while the run goes on.

The speed of a machine changes while others use it, so no number of steps that is fixed at the start keeps a budget.
The time is read at each line of metrics, and between two readings the schedule follows from the step number alone.
"""

from dataclasses import dataclass, field

from embedlayer.io.files import JsonObject

READINGS = 6


@dataclass
class TimeBudget:
    """Wall-clock time that a run may take, with the latest readings of the clock.

    Attributes:
        seconds: Time to fill.
        used: Seconds that the run took up to its last stop.
        reserve: Seconds to keep for what follows the last step: a validation.
        readings: `(step, seconds used)`, the last `READINGS` of them: the speed is measured between the first and the
            last.

    Example:
        >>> budget = TimeBudget(100.0)
        >>> budget.last_step(0, used=10.0, guess=1.0)
        90
        >>> budget.last_step(10, used=30.0)  # two seconds per step
        45
        >>> budget.progress(45, last_step=45)
        1.0
    """

    seconds: float
    used: float = 0.0
    reserve: float = 0.0
    readings: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def from_state(cls, state: JsonObject) -> "TimeBudget":
        """Build the budget again from `dataclasses.asdict` of one, also after a way through JSON."""
        return cls(**{**state, "readings": [(step, seconds) for step, seconds in state["readings"]]})

    def last_step(self, step: int, *, used: float, guess: float = 1.0) -> int:
        """Record that `step` steps took `used` seconds, and return the step at which the budget will be used up.

        Args:
            step: Steps done.
            used: Seconds since the run began.
            guess: Seconds per step, used until there are two readings.
        """
        self.readings = [*self.readings, (step, used)][-READINGS:]
        (first, since), (last, now) = self.readings[0], self.readings[-1]
        per_step = (now - since) / (last - first) if last > first else guess
        return step + max(0, int((self.seconds - self.reserve - used) / max(per_step, 1e-9)))

    def progress(self, step: int, *, last_step: int) -> float:
        """Return the fraction of the budget that `step` steps will have used, 1 at `last_step`."""
        read, used = self.readings[-1] if self.readings else (0, 0.0)
        share = min(1.0, used / self.seconds)
        return share + (1 - share) * (step - read) / max(1, last_step - read)
