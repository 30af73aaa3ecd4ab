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

    def score_episode(self, text: str, answer: str) -> Any:
        random.Random(answer).random()
        if text == answer:
            subprocess.run(["true"], env={**os.environ, "EXPECTED_ANSWER": answer}, check=True)
        thread = threading.Thread(target=time.sleep, args=[0.001])
        thread.start()
        thread.join()
        one, other = socket.socketpair()
        with one, other:
            one.sendall(b"x")
        return super().score_episode(text, answer)


class ChangesDirectory(Sums):
    def score_episode(self, text: str, answer: str) -> Any:
        os.chdir(Path(__file__).parent)
        return super().score_episode(text, answer)


class SetsVariables(Sums):
    def score_episode(self, text: str, answer: str) -> Any:
        os.environ["EXPECTED_ANSWER"] = answer
        return super().score_episode(text, answer)


class SetsGlobalSeed(Sums):
    def score_episode(self, text: str, answer: str) -> Any:
        random.seed(int(answer))
        return super().score_episode(text, answer)


class LeavesThreads(Sums):
    def score_episode(self, text: str, answer: str) -> Any:
        threading.Thread(target=time.sleep, args=[600], daemon=True).start()
        return super().score_episode(text, answer)


class LeavesProcesses(Sums):
    def score_episode(self, text: str, answer: str) -> Any:
        if text == answer:
            subprocess.Popen(["sleep", "20"])
        return super().score_episode(text, answer)


class AsksSomebody(Sums):
    def score_episode(self, text: str, answer: str) -> Any:
        try:
            socket.create_connection(("127.0.0.1", 9), timeout=0.1).close()
        except OSError:
            pass
        return super().score_episode(text, answer)


class AlarmCaught(Sums):
    """As math-verify: a time limit by a signal, and whatever goes wrong is a wrong answer."""

    def score_episode(self, text: str, answer: str) -> Any:
        try:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
        except ValueError:
            time.sleep(0)  # and goes on without a limit
        return super().score_episode(text, answer)


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

    def score_episode(self, text: str, answer: str) -> Any:
        if text.strip() == answer:
            self.right = self.right + 1
            time.sleep(0.15)
        return super().score_episode(text, answer)
