"""Estimate how many training steps fit into a wall-clock time, while the run continues.

The speed of a machine changes, so a number of steps that is fixed at the start does not keep a time budget. The clock
is read at each line of metrics. Between two readings the schedule depends on the step number alone.
"""

from dataclasses import dataclass, field

READINGS = 6


@dataclass
class TimeBudget:
    """Wall-clock time of a run, with the latest readings of the clock.

    Attributes:
        seconds: Time to fill, in seconds.
        used: Seconds that the run used before its last stop.
        reserve: Seconds for the validation after the last step.
        readings: The last `READINGS` pairs of a step and the seconds used; they determine the speed.

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
    readings: list[list[int | float]] = field(default_factory=list)

    def last_step(self, step: int, *, used: float, guess: float = 1.0) -> int:
        """Record that `step` steps took `used` seconds, and estimate the step at which the time is used up.

        Args:
            step: Number of finished steps.
            used: Seconds since the start of the run.
            guess: Seconds per step, until there are two readings.
        """
        self.readings = [*self.readings, [step, used]][-READINGS:]
        (first, since), (last, now) = self.readings[0], self.readings[-1]
        per_step = (now - since) / (last - first) if last > first else guess
        return step + max(0, int((self.seconds - self.reserve - used) / max(per_step, 1e-9)))

    def progress(self, step: int, *, last_step: int) -> float:
        """Return the estimated fraction of the time that `step` steps use, 1 at `last_step`."""
        read, used = self.readings[-1] if self.readings else (0, 0.0)
        share = min(1.0, used / self.seconds)
        return share + (1 - share) * (step - read) / max(1, last_step - read)
