"""Which units of a root are gathered, and which parameters modules have meanwhile."""

from __future__ import annotations

from . import _C
from ._gathered import refuse_writes
from ._unit import Unit


class Residence:
    """What a runtime knows of it.

    Attributes:
        units: in forward order as far as known, the root last.
        stays_gathered: all units, through all passes.
        running: forwards under way, the outermost first, each with the exception that was being handled when it began.
        in_backward: whether a backward pass is under way, or a graph that one has made waits for another.
        written: parameters that somebody wrote to while they were gathered, until it is told.
    """

    engine: "_C.Engine | None"

    def __init__(self, units: list[Unit]):
        self.units = units
        self.root = units[-1]
        self.stays_gathered = False
        self.running: list[tuple[Unit, BaseException | None]] = []
        self.in_backward = False
        self.written: list[str] = []

    def keep_gathered(self, keep: bool) -> None:
        """Whether all units stay gathered. Between passes parameters are the sharded ones in any case."""
        self.stays_gathered = keep
        (self.engine.gather_all if keep else self.engine.release_all)()
        for u in self.units:
            u.show(runtime=False)

    def unshard(self, unit: Unit) -> None:
        """Gathers a unit, and shows its whole parameters. Collective."""
        self.leave_broken()
        if not self.running and not self.in_backward:
            # The engine brings whole parameters up to date with writes where none is gathered. What a forward has left
            # gathered is so again when its backward comes to it.
            if self.stays_gathered:
                shown = [u for u in self.units if u.shows_runtime]
                self.keep_gathered(True)
                for u in shown:
                    u.show(runtime=True)
            else:
                self._give_up([u for u in self.units if not u.shows_runtime])
        for part in unit.parts_of_it():
            self.engine.gather(part.index)
            part.begin_pass()

    def reshard(self, unit: Unit) -> None:
        """Modules have the unit's sharded parameters again."""
        self.leave_broken()
        for part in unit.parts_of_it():
            if not self.stays_gathered:
                self.engine.release(part.index)
            part.note_writes()
            part.show(runtime=False)
        self.refuse_writes()

    def release_for_load(self, unit: Unit, name: str) -> None:
        if self.running or self.in_backward:
            raise RuntimeError(f"load_state_dict: {name} is gathered by a pass under way: wanted it between passes")
        self.reshard(unit)

    def _give_up(self, units: list[Unit]) -> None:
        """Sharded parameters instead of whole ones, where nothing else needs these."""
        for u in units:
            if not u.gathered:
                continue
            if not self.stays_gathered:
                self.engine.release(u.index)
            u.note_writes()
            u.show(runtime=False)

    def refuse_writes(self) -> None:
        """Raises where somebody has written to gathered parameters since it was called last."""
        names, self.written = list(dict.fromkeys(self.written)), []
        refuse_writes(names)

    def _begun(self, unit: Unit) -> int | None:
        """Where in `running` the unit's last forward is; None where it did not come so far."""
        return next((i for i in reversed(range(len(self.running))) if self.running[i][0] is unit), None)

    def forward_failed(self, unit: Unit) -> None:
        """The unit is released, and all units after the outermost forward: no backward pass may come to them."""
        begun = self._begun(unit)
        if begun is None:
            return
        del self.running[begun:]
        for part in unit.parts_of_it():
            self.engine.forward_failed(part.index)
        if not self.in_backward:  # there checkpoints break recomputations off, and go on
            self._give_up(self._ended_with(unit))

    def _ended_with(self, unit: Unit) -> list[Unit]:
        """Those whose pass ends with a unit's forward: where it is the outermost, also what is below it."""
        if self.running:
            return unit.parts_of_it()
        if unit is self.root:
            return self.units
        inside = {id(m) for top in unit.modules for m in top.modules()}
        return [u for u in self.units if id(u.modules[0]) in inside]

    def _look_for_writes(self, unit: Unit) -> None:
        """At the end of a unit's forward."""
        ends = self._ended_with(unit)
        for u in ends:
            u.note_writes()
        if self.written:
            self._give_up(ends)
            self.refuse_writes()
