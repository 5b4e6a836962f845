"""Estimate how many training steps fit into a wall-clock time, while the run continues.

The speed of a machine changes, so a number of steps that is fixed at the start does not keep a time budget. The clock
is read at each line of metrics. Between two readings the schedule depends on the step number alone.
"""

from dataclasses import dataclass, field

READINGS = 6


@dataclass
class TimeBudget:
    """Estimate of how many training steps fit into a wall-clock time, from measurements during the run.

    Attributes:
        seconds: Time for the whole run, in seconds.
        min_steps: Smallest number of steps of the run, also if they take longer than `seconds`.
        used: Seconds that the run took until it was last interrupted; 0 for a new run.
        reserve: Seconds to keep for the validation after the last step.
        readings: The last `READINGS` measurements, as pairs (finished steps, seconds used); they give the speed.

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
    min_steps: int = 1
    used: float = 0.0
    reserve: float = 0.0
    readings: list[list[int | float]] = field(default_factory=list)

    def last_step(self, step: int, *, used: float, guess: float = 1.0) -> int:
        """Add a measurement to `readings`, and return the number of the step at which the time will be used up.

        The result is at least `step` and at least `min_steps`. So far `step` steps are finished, which took `used`
        seconds. `guess` is the seconds of a step to assume as long as there is only one measurement.
        """
        self.readings = [*self.readings, [step, used]][-READINGS:]
        fitting = int((self.seconds - self.reserve - used) / max(self._seconds_per_step(guess), 1e-9))
        return max(self.min_steps, step + max(0, fitting))

    def progress(self, step: int, *, last_step: int) -> float:
        """Estimate which fraction of `expected_seconds` will be used when step `step` ends, from 0 to 1."""
        read, used = self.readings[-1] if self.readings else (0, 0.0)
        share = used / self.expected_seconds
        return share + (1 - share) * (step - read) / max(1, last_step - read)

    @property
    def expected_seconds(self) -> float:
        """Return `seconds`, or the time that the run will have taken after `min_steps` steps if that is longer."""
        read, used = self.readings[-1] if self.readings else (0, 0.0)
        return max(self.seconds, used + self._seconds_per_step(0.0) * max(0, self.min_steps - read))

    def _seconds_per_step(self, guess: float) -> float:
        """Return the seconds of a step by the readings, or `guess` as long as they do not show it."""
        if not self.readings or self.readings[0][0] == self.readings[-1][0]:
            return guess
        (first, since), (last, now) = self.readings[0], self.readings[-1]
        return (now - since) / (last - first)
