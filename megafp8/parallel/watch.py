"""Which rank has not come, was the first to fail, or has fallen silent, told by the others.

A rank that dies, or is stopped, shows on the others as a broken or endless collective whose message
names an address at best. Here every rank leaves signs of life in the rendezvous store, from a
thread, so that a long step counts as life and a stopped process does not; and a rank that fails
leaves its reason there. A rank that then finds a collective broken looks up whose fault it is.

Until a run has begun, a rank that a signal ends takes the others with it: each gets the signal too.
"""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from megafp8.errors import LaunchError, MeetingError, MegaFP8Error, PeerError, StoppedBySignal
from megafp8.log import get_logger
from megafp8.parallel.broken import broken_collective, collective_of, waited_in_vain
from megafp8.parallel.meeting import PLACE, Meeting, gave_up
from megafp8.parallel.rendezvous import Rendezvous
from megafp8.parallel.signs import SignsOfLife

log = get_logger(__name__)

T = TypeVar("T")
_PREFIX = "megafp8_watch"
_FIRST_WORD, _NEXT_WORDS = 3.0, 60.0  # seconds until it is told for whom a rank waits, and again
_OPENS = 2.0  # seconds that a rank that leaves before the store is open waits for it, to leave word
_RESOLVES = 25.0  # seconds in which the name of the rendezvous host has to resolve
_PATIENCE = 5  # times `beat` from a rank's failure to a word of a rank whose main thread has none


class Watch:
    """A context around everything that a rank does once it knows how many ranks there are.

    Args:
        rank: This rank.
        size: Ranks in all.
        beat: Seconds between signs of life.
        silence: Seconds without one after which a rank is called silent in the log.
        rendezvous: Where the ranks meet; None where they have, in the default process group.
        asked: The signal that is about to end this process before its first iteration; 0 if none.

    Attributes:
        place: What this rank is doing, for others to read.
        setting_up: No iteration has begun: a signal to one rank ends all of them.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        beat: float = 1.0,
        silence: float = 15.0,
        rendezvous: Rendezvous | None = None,
        asked: Callable[[], int] = lambda: 0,
    ) -> None:
        self.rank, self.size, self.beat = rank, size, beat
        self.place = "set-up"
        self.setting_up = rendezvous is not None
        self._rendezvous, self._asked = rendezvous, asked
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._shared: Any = None  # for the process group
        self._store: Any = None
        self._opened = threading.Event()  # or it is known why the store cannot be
        self._trouble: MegaFP8Error | None = None
        self._life = SignsOfLife(rank, silence)
        self._failed = ""  # what a rank published before it left: "rank place: reason"
        self._heard = math.inf  # when that was heard of, as long as nothing is told of it
        self._ended_by = 0  # the signal that made it leave, where one did before the run had begun
        self._left_word = False  # whether `_failed` is a signal that the main thread may not act on
        self._asked_before = False  # whether a signal was there one beat ago
        self._leaving = False  # whether the main thread knows that something has failed
        self._meeting = None if rendezvous is None else Meeting(rank, size, rendezvous.address)

    def __enter__(self) -> "Watch":
        self._begin()
        return self

    def _begin(self) -> None:
        if self.size > 1 and self._thread is None:
            self._thread = threading.Thread(target=self._live, name="watch", daemon=True)
            self._thread.start()

    def meet(self, timeout: timedelta, late: timedelta) -> Any:
        """Wait until all ranks have come here.

        Args:
            timeout: How long a rank may give no sign of life.
            late: How long one may stay away that does; it may have an index to build.

        Returns:
            A connection to the rendezvous store, for the process group.

        Raises:
            LaunchError: the store cannot be opened.
            MeetingError: ranks are missing.
            PeerError: another rank has failed before it came, or rank 0 has gone with the store.
        """
        assert self._rendezvous is not None and self._meeting is not None
        self._begin()
        self.place, self._meeting.arrived = PLACE, True
        began = time.monotonic()
        word = began + _FIRST_WORD
        while not self._meeting.complete:
            trouble = "" if self._store else self._rendezvous.trouble
            waits, speaks = self._meeting.text(trouble), self._meeting.speaks()
            if self._trouble is not None:
                raise self._trouble
            if self._failed:
                raise self._others_failure()
            if not self._rendezvous.resolved and time.monotonic() > began + _RESOLVES:
                raise LaunchError(self._rendezvous.unresolved)
            if self._meeting.quiet(began, timeout.total_seconds()):
                raise MeetingError(gave_up(waits, timeout, "no sign of life"), speaks)
            if self._meeting.counts() and time.monotonic() > began + late.total_seconds():
                raise MeetingError(gave_up(waits, late, "alive, but not here"), speaks)
            if time.monotonic() > word and speaks:
                log.log(logging.WARNING if self.rank == 0 else logging.ERROR, "%s", waits)
                word = time.monotonic() + _NEXT_WORDS
            time.sleep(0.02)
        return self._shared

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Publish a failure of this rank's own, or raise what ended the rank behind it."""
        self._leaving = True
        try:
            if error is not None and self._thread is not None:
                self._opened.wait(_OPENS)
            if error is None or self._store is None:
                return
            peer = self._leave(error)
            if peer is not None and peer is not error:
                raise peer from error
        finally:
            self._stop.set()

    def _leave(self, error: BaseException) -> BaseException | None:
        """Publish an error, or find out what is behind it; what is to be raised in its stead."""
        # An interrupt may have come while a collective failed because of others' interrupts.
        broken = broken_collective(error) if isinstance(error, Exception) else None
        ended = error if isinstance(error, StoppedBySignal) else None
        peer: BaseException | None = None
        try:
            if broken is None:
                self._publish(error)
            else:
                peer = self._explain(broken)
            if self.rank == 0:  # the store may be this process's own
                self._wait_until_heard()
        except StoppedBySignal as signalled:
            ended = signalled if broken is not None else ended
        if ended is None or peer is not None:
            return peer
        # Launchers answer the failure of one rank with a signal to the others.
        if not self._failed:
            self._ask(self._hear)
        return self._peer_error() if self.fault else ended

    def _wait_until_heard(self) -> None:
        """Stay until the others know what has failed; they look once a beat."""
        others = [rank for rank in range(1, self.size) if not self._failed.startswith(f"{rank} ")]
        keys = [f"heard_{rank}" for rank in others]
        limit = time.monotonic() + 5.0 * self.beat
        while time.monotonic() < limit and self._ask(lambda: self._store.check(keys)) is False:
            time.sleep(0.1 * self.beat)

    # ------------------------------------------------------------------------ signs of life

    def _live(self) -> None:
        try:
            if self._store is None:
                self._open()
        except MegaFP8Error as error:
            self._trouble = error
            return
        finally:
            self._opened.set()
        count, pause, began = 0, 0.0, time.monotonic()
        # The lowest rank looks after the others, the next one after the lowest.
        watched = [rank for rank in range(self.size) if rank != self.rank] if self.rank < 2 else []
        while not self._stop.wait(pause):
            meeting = self._meeting is not None and not self._meeting.complete
            # While ranks meet, nobody shall lose a noticeable part of what the others took.
            elapsed = time.monotonic() - began
            count, pause = count + 1, min(self.beat, 0.02 + 0.1 * elapsed) if meeting else self.beat
            if self.setting_up and (self._left_word or self._ended_by):
                continue  # a signal ends all ranks: the store may go at any moment
            try:
                self._life.leave(self._store, count, self.place)
                self._leave_word_of_signal()
                self._hear()
                self._point_out()
                if meeting and self._meeting is not None:
                    self._meeting.look(self._store, partial(self._life.of, self._store))
                # Every fifth beat: a store of thousands of ranks has other things to do.
                elif count % 5 == 0:
                    self._life.call_silent(
                        self._store, watched if self.rank == 0 else watched[:1], self.place
                    )
            except RuntimeError:  # DistError: every failure of the store
                # It is gone, and with it the run; the main thread will notice, but where it meets.
                self._trouble = self._trouble or self._store_is_gone()
                return

    def _open(self) -> None:
        """Connect to the store."""
        if self._rendezvous is None:
            self._shared = dist.distributed_c10d._get_default_store()
        else:
            self._shared = self._rendezvous.open(self._stop)
        # A connection of its own: the shared one may be inside a long wait.
        self._store = dist.PrefixStore(_PREFIX, self._shared.clone())  # pyright: ignore[reportPrivateImportUsage]

    def _store_is_gone(self) -> PeerError:
        where = "" if self._rendezvous is None else f" at {self._rendezvous.address}"
        return PeerError(
            f"the rendezvous store{where} is gone, and with it rank 0 or the launcher that held "
            "it: look at what that printed",
            self.rank == 1,
        )

    def _hear(self) -> None:
        """Find out whether a rank has failed, and follow one that a signal ended in its set-up."""
        published = self._store.get("failed") if self._store.check(["failed"]) else b""
        # "signal rank place: reason", signal 0 for none
        number, _, failed = published.decode().partition(" ")
        if failed and failed != self._failed:
            self._store.set(f"heard_{self.rank}", "")
            self._heard = time.monotonic()
            self._ended_by = int(number) if self.setting_up else 0
            if self._ended_by and not (self._leaving or self._asked()):  # it knows already
                # The main thread may be where only the end of the process gets it out.
                os.kill(os.getpid(), self._ended_by)
        elif not failed:  # nobody has, or a signal ended nobody after all
            self._ended_by, self._heard = 0, math.inf
        self._failed = failed

    def _leave_word_of_signal(self) -> None:
        """Do it for a main thread that is in a wait which no handler interrupts.

        It is taken back where the ranks, which ask each other for signals last, have begun.
        """
        if self._left_word and not self.setting_up and not self._leaving:
            self._store.set("failed", "")
            self._left_word = False
        number = self._asked() if self.setting_up and not self._leaving else 0
        if number and self._asked_before and not self._left_word:
            word = f"{number} {self.rank} {self.place}: {_name(number)}"
            # Two ranks may be signalled at once: the first word stands, on all of them.
            self._left_word = self._store.compare_set("failed", "", word).decode() == word
        self._asked_before = bool(number)

    def _point_out(self) -> None:
        """Tell who failed while the main thread waits on, where that may never raise.

        A broken collective of gloo raises. A wait for a GPU does not, and NCCL's own watchdog may
        end the process in the middle of it.
        """
        if self._leaving or time.monotonic() < self._heard + _PATIENCE * self.beat:
            return
        self._heard = math.inf
        culprit, _, text = self._failed.partition(" ")
        if self._speaks({int(culprit)}):
            log.error(
                "rank %s failed first, at %s; this rank is at %s and waits",
                culprit,
                text,
                self.place,
            )

    def _speaks(self, culprits: set[int]) -> bool:
        """Whether this rank is the one that tells, the lowest of those that are not to blame."""
        return self.rank == min(rank for rank in range(self.size) if rank not in culprits)

    # ------------------------------------------------------------------------------ failures

    def _publish(self, error: BaseException) -> None:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:2000]
        number = 0
        if isinstance(error, KeyboardInterrupt):
            text, number = "interrupted (SIGINT)", signal.SIGINT
        elif isinstance(error, StoppedBySignal):
            text, number = _name(error.number), error.number
        self._claim(f"{self.rank} {self.place}: {text}", number if self.setting_up else 0)

    def _claim(self, failure: str, number: int = 0) -> None:
        """Publish "rank place: reason", and the number of a signal that the others shall follow.

        An earlier failure stands. One word holds both: nobody shall see the one without the other.
        """

        def claim() -> None:
            self._store.compare_set("failed", "", f"{int(number)} {failure}")
            self._store.set(f"heard_{self.rank}", "")

        if not self._failed:
            self._ask(claim)

    @property
    def fault(self) -> str:
        """What another rank has failed with, which was no signal in its set-up; "" if nothing."""
        own = self._failed.startswith(f"{self.rank} ")
        return "" if own or self._ended_by or not self._failed else str(self._peer_error())

    def _others_failure(self, where: str = "") -> BaseException:
        """The error that another rank's published failure is for this one."""
        if self._ended_by == signal.SIGINT:
            return KeyboardInterrupt()
        if self._ended_by:
            return StoppedBySignal(self._ended_by)
        return self._peer_error(where)

    def _peer_error(self, where: str = "") -> PeerError:
        culprit, _, text = self._failed.partition(" ")
        where = where or f"rank {self.rank} was at {self.place}"
        # The culprit tells its own story at length; this is the pointer to it.
        text = f"rank {culprit} failed first, at {text}; {where}"
        return PeerError(text, self._speaks({int(culprit)}))

    def _explain(self, error: Exception) -> BaseException | None:
        """The rank behind a broken collective: one that published a failure, fell silent, is late.

        A late one is alive and has not waited in vain itself, whatever it met when it came.
        """
        where = f"rank {self.rank} was at {self.place}, in {collective_of(error)}"
        others = [rank for rank in range(self.size) if rank != self.rank]
        if waited_in_vain(error):
            self._ask(lambda: self._store.set(f"waited_{self.rank}", ""))
        before = self._ask(lambda: self._life.of(self._store, others))
        limit = time.monotonic() + 3.5 * self.beat
        while before is not None and not self._failed and time.monotonic() < limit:
            self._ask(self._hear)
            time.sleep(0.0 if self._failed else 0.2)
        if self._failed:
            return self._others_failure(where)
        after = None if before is None else self._ask(lambda: self._life.of(self._store, others))
        if before is None or after is None:
            return PeerError(
                f"rank 0, or the launcher that holds the rendezvous store, does not answer: "
                f"stopped, killed or cut off; {where}",
                self.rank == 1,
            )
        # A living rank counts its beats: a sign that stood still for 3.5 of them is no rank's that
        # lives.
        silent = [rank for rank in others if after[rank] == before[rank]]
        everyone = range(self.size)
        waited = self._ask(lambda: [r for r in everyone if self._store.check([f"waited_{r}"])])
        # Where nobody timed out, nobody is late: a network that broke between living ranks.
        late = [rank for rank in everyone if rank not in waited] if waited else []
        culprits = silent or late
        if not culprits:
            return None
        after.setdefault(self.rank, f"0 {self.place}")
        names = f"rank{'s' if len(culprits) > 1 else ''} {', '.join(map(str, culprits))}"
        places = {after[rank].partition(" ")[2] or "set-up" for rank in culprits}
        at = ", ".join(sorted(places))
        text = "no sign of life (stopped, killed or cut off)"
        if not silent:
            text = "alive, but not where the others waited until the timeout (too slow?)"
        # Whoever finds this rank gone shall not blame it. Nor shall a late one, when it comes.
        self._claim(f"{culprits[0]} {at}: {text}")
        speaks = self._speaks(set(culprits))
        return PeerError(f"{names}: {text}, last at {at}; {where}", speaks)

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Ask the store; None if it has no answer within a few seconds, as when it is stopped."""
        answer: list[T] = []

        def ask() -> None:
            try:
                answer.append(question())
            except RuntimeError as error:  # DistError: every failure of the store
                log.debug("the rendezvous store is gone: %s", error)

        # A question to a stopped store never returns; the thread that asked it is left behind.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(3.0 * self.beat)
        return answer[0] if answer else None


def _name(number: int) -> str:
    return signal.Signals(number).name
