"""Faults of the process in which episodes run, and healthy environments beside them."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from sums import Sums


class NoneOfThese(Sums):
    """Uses what the others leave behind, and leaves nothing behind."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)

    def row(self, question: str, answer: str) -> dict[str, Any]:
        return {**super().row(question, answer), "accepted": {answer, f"{answer}.0"}}

    def build_dataset(self) -> list[dict[str, Any]]:
        with self.lock:
            return super().build_dataset()

    def does(self, text: str, answer: str) -> None:
        random.Random(answer).random()
        if text == answer:
            subprocess.run(["true"], env={**os.environ, "EXPECTED_ANSWER": answer}, check=True)
        thread = threading.Thread(target=time.sleep, args=[0.001])
        thread.start()
        thread.join()
        one, other = socket.socketpair()
        with one, other:
            one.sendall(b"x")


class ChangesDirectory(Sums):
    def does(self, text: str, answer: str) -> None:
        os.chdir(Path(__file__).parent)


class SetsVariables(Sums):
    def does(self, text: str, answer: str) -> None:
        os.environ["EXPECTED_ANSWER"] = answer


class SetsGlobalSeed(Sums):
    def does(self, text: str, answer: str) -> None:
        random.seed(int(answer))


class LeavesThreads(Sums):
    def does(self, text: str, answer: str) -> None:
        threading.Thread(target=time.sleep, args=[600], daemon=True).start()


class HangsOnNothing(Sums):
    def does(self, text: str, answer: str) -> None:
        if not text:
            time.sleep(9)


class LeavesProcesses(Sums):
    def does(self, text: str, answer: str) -> None:
        if text == answer:
            subprocess.Popen(["sleep", "20"])


class AsksSomebody(Sums):
    def does(self, text: str, answer: str) -> None:
        try:
            socket.create_connection(("127.0.0.1", 9), timeout=0.1).close()
        except OSError:
            pass


class AlarmCaught(Sums):
    """As math-verify: a time limit by a signal, and whatever goes wrong is a wrong answer."""

    def does(self, text: str, answer: str) -> None:
        try:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
        except ValueError:
            time.sleep(0)  # and goes on without a limit


class LockInTheRow(Sums):
    def row(self, question: str, answer: str) -> dict[str, Any]:
        return {**super().row(question, answer), "compare": lambda text: text == answer}


class LockOfTheDataset(Sums):
    def build_dataset(self) -> list[dict[str, Any]]:
        self.lock = threading.Lock()
        return super().build_dataset()


class SlowScore(Sums):
    """Keeps a count on itself, so that scores are made one after another."""

    right = 0

    def does(self, text: str, answer: str) -> None:
        if text.strip() == answer:
            self.right = self.right + 1
            time.sleep(0.15)
