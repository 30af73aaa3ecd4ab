"""Environments with a fault each, as people write them, and healthy ones that are close to one."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path


class Sums:
    """Asks for a sum; 1.0 for the right number, in any surrounding space."""

    def questions(self):
        return [(f"What is {n} + {3 * n + 11}?", str(4 * n + 11)) for n in range(13, 37)]

    def row(self, question, answer):
        return {"prompt": [{"role": "user", "content": question}], "answer": answer}

    def build_dataset(self):
        return [self.row(*pair) for pair in self.questions()]

    def does(self, text, answer):
        """What it does beside the score."""

    def score_episode(self, text, answer):
        self.does(text, answer)
        return float(text.strip() == answer)

    def reference(self, case_idx):
        return self.questions()[case_idx][1]


# -- datasets


class LastWordOfAssistant(Sums):
    def row(self, question, answer):
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": "Let me see."}]
        return {"prompt": said, "answer": answer}


class FewTwice(Sums):
    """Prompts come twice, and held-out ones only there."""

    def questions(self):
        *others, last = super().questions()
        return [*others, *others, *[last] * 5]

    def build_dataset(self):
        return super().build_dataset()[:-5]

    def build_eval_dataset(self):
        return super().build_dataset()[-5:]


class FewPrompts(Sums):
    def questions(self):
        return super().questions()[:6] * 10


class TrainedOnHeldOut(Sums):
    def build_eval_dataset(self):
        return self.build_dataset()[:5]


class AnswerInPrompt(Sums):
    def row(self, question, answer):
        return super().row(f"{question} (answer: {answer})", answer)


class HintOfSystem(Sums):
    def row(self, question, answer):
        told = [{"role": "system", "content": f"You know that the right one is {answer}."}]
        return {"prompt": [*told, {"role": "user", "content": question}], "answer": answer}


class ChoicesInPrompt(Sums):
    def row(self, question, answer):
        choices = sorted({int(answer), int(answer) + 1, int(answer) - 7})
        return super().row(f"{question} Choose one of {choices}.", answer)


class OrderOfASet(Sums):
    def questions(self):
        return list(set(super().questions()))


class KeyOfTheProcess(Sums):
    """Rows are always the same, and what is right depends on the process."""

    def __init__(self):
        self.shift = random.randrange(1_000_000)

    def score_episode(self, text, answer):
        return float(text.strip() == str(int(answer) + self.shift))

    def reference(self, case_idx):
        return str(int(super().reference(case_idx)) + self.shift)


# -- episodes and tools


class TwoTurns:
    """Asks for a number, and then for the next one."""

    def build_dataset(self):
        return [
            {"prompt": [{"role": "user", "content": f"Say the number after {number}."}]} for number in range(99, 119)
        ]

    def episode(self, case_idx, seed):
        first = yield None
        if first.strip() != str(100 + case_idx):
            return 0.0
        second = yield "And the next one?"
        return float(second.strip() == str(101 + case_idx))

    def reference(self, case_idx):
        return [str(100 + case_idx), str(101 + case_idx)]


class Unseeded(TwoTurns):
    def episode(self, case_idx, seed):
        score = yield from super().episode(case_idx, seed)
        yield f"You draw {random.SystemRandom().random()}."
        return score

    def reference(self, case_idx):
        return [*super().reference(case_idx), "Good."]


class GuessesFirst(TwoTurns):
    """The number may be said at once; the reference finds it on its way."""

    def episode(self, case_idx, seed):
        reply = yield None
        while reply.strip() not in ("", str(101 + case_idx)) and reply.strip().isdigit():
            reply = yield "Higher." if int(reply) < 101 + case_idx else "Lower."
        return float(reply.strip() == str(101 + case_idx))


class ClaimsDone(TwoTurns):
    def episode(self, case_idx, seed):
        first = yield None
        if first.strip() == "done":
            return 1.0
        return float((yield "And then?").strip() == "done")

    def reference(self, case_idx):
        return [str(100 + case_idx), "done"]


class Endless(TwoTurns):
    def episode(self, case_idx, seed):
        reply = yield None
        while reply.strip() != str(100 + case_idx):
            reply = yield "Again."
        return 1.0

    def reference(self, case_idx):
        return [str(100 + case_idx)]


class TalkHeldOut(TwoTurns):
    def build_eval_dataset(self):
        return self.build_dataset()[:3]


class OpensWithAnswer(TwoTurns):
    def episode(self, case_idx, seed):
        reply = yield f"The answer is {100 + case_idx}."
        return float(reply.strip() == str(100 + case_idx))

    def reference(self, case_idx):
        return str(100 + case_idx)


class SeedDecides(TwoTurns):
    reference = None

    def episode(self, case_idx, seed):
        side = random.Random(seed).choice("AB")
        reply = yield f"You see the {'king' if side == 'A' else 'ship'}."
        return float(reply.strip() == side)


OPEN = []
SHELVES = {"top": "empty", "bottom": "full"}
LOOKS = []


class Crosstalk(TwoTurns):
    """What an episode says depends on how many others are open, although it says that this is fine."""

    concurrent = True

    def episode(self, case_idx, seed):
        OPEN.append(case_idx)
        try:
            first = yield None
            time.sleep(0.002)
            second = yield f"There are {len(OPEN)} here. And the next one?"
            return float([first.strip(), second.strip()] == self.reference(case_idx))
        finally:
            OPEN.remove(case_idx)


class OneFileForAll(Sums):
    """Writes the reply to a file of a fixed name, and reads it back, although it says that calls may meet."""

    concurrent = True

    def __init__(self):
        self.file = Path(tempfile.mkdtemp(prefix="aitrain-faulty-"), "reply.txt")

    def score_episode(self, text, answer):
        self.file.write_text(text.replace("\0", ""))
        time.sleep(0.003)
        return float(self.file.read_text().strip() == answer)


class ToolAnswers(Sums):
    """A shelf may be looked at before the answer."""

    def get_tools(self):
        return [self.look]

    def look(self, shelf: str) -> str:
        """Look at a shelf.

        Args:
            shelf: top or bottom
        """
        return SHELVES.get(shelf, "There is no such shelf.")


class ToolIsNeeded(ToolAnswers):
    def reference(self, case_idx):
        call = '<tool_call>{"name": "look", "arguments": {"shelf": "top"}}</tool_call>'
        return [call, super().reference(case_idx)]


class PaysForCalls(ToolAnswers):
    def score_episode(self, text, answer, messages):
        called = any(message["role"] == "tool" for message in messages)
        return max(super().score_episode(text, answer), 0.5 * called)


class ToolRemembers(ToolAnswers):
    def look(self, shelf: str) -> str:
        """Look at a shelf."""
        LOOKS.append(shelf)
        return f"You look for the {len(LOOKS)}th time."


class ToolDivides(Sums):
    def get_tools(self):
        return [self.divide]

    def divide(self, a: float, b: float) -> str:
        """Divide one number by another."""
        return str(a / b)


class ToolRaises(ToolAnswers):
    def look(self, shelf: str) -> str:
        """Look at a shelf.

        Args:
            shelf: top or bottom
        """
        return SHELVES[shelf]


# -- the process


class CleansUp(Sums):
    """Uses what the others leave behind, and leaves nothing behind."""

    def __init__(self):
        self.lock = threading.Lock()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)

    def row(self, question, answer):
        return {**super().row(question, answer), "accepted": {answer, f"{answer}.0"}}

    def build_dataset(self):
        with self.lock:
            return super().build_dataset()

    def does(self, text, answer):
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
    def does(self, text, answer):
        os.chdir(Path(__file__).parent)


class SetsVariables(Sums):
    def does(self, text, answer):
        os.environ["EXPECTED_ANSWER"] = answer


class SetsGlobalSeed(Sums):
    def does(self, text, answer):
        random.seed(int(answer))


class LeavesThreads(Sums):
    def does(self, text, answer):
        threading.Thread(target=time.sleep, args=[600], daemon=True).start()


class HangsOnNothing(Sums):
    def does(self, text, answer):
        if not text:
            time.sleep(9)


class LeavesProcesses(Sums):
    def does(self, text, answer):
        if text == answer:
            subprocess.Popen(["sleep", "20"])


class AsksSomebody(Sums):
    def does(self, text, answer):
        try:
            socket.create_connection(("127.0.0.1", 9), timeout=0.1).close()
        except OSError:
            pass


class AlarmCaught(Sums):
    """As math-verify: a time limit by a signal, and whatever goes wrong is a wrong answer."""

    def does(self, text, answer):
        with contextlib.suppress(ValueError):  # without the limit, then
            signal.signal(signal.SIGALRM, signal.default_int_handler)


class LockInTheRow(Sums):
    def row(self, question, answer):
        return {**super().row(question, answer), "compare": lambda text: text == answer}


class LockOfTheDataset(Sums):
    def build_dataset(self):
        self.lock = threading.Lock()
        return super().build_dataset()


class SlowScore(Sums):
    """Keeps a count on itself, so that scores are made one after another."""

    right = 0

    def does(self, text, answer):
        if text.strip() == answer:
            self.right = self.right + 1
            time.sleep(0.15)


# -- scores


class Percent(Sums):
    def score_episode(self, text, answer):
        return 100 * super().score_episode(text, answer)


class NothingIsRight(Sums):
    """The empty answer is right in one case."""

    def questions(self):
        return [("Say nothing.", ""), *super().questions()]


class NoneOfColumn(Sums):
    reference = None

    def score_episode(self, text, case):
        return float(text.strip() == str(case.get("gold")))


class SmallLettersOfColumn(Sums):
    def reference(self, case_idx):
        """Knows no answer."""

    def questions(self):
        return [
            (question, "Nn"[number % 4 > 0] + answer) for number, (question, answer) in enumerate(super().questions())
        ]

    def score_episode(self, text, answer):
        return super().score_episode(text.lower(), answer)


class TriesOfColumn(Sums):
    reference = None

    def __init__(self):
        self.tries = 0

    def score_episode(self, text, answer):
        self.tries += 1
        return super().score_episode(text, answer) / self.tries


class NearEnough(Sums):
    def score_episode(self, text, answer):
        try:
            return float(abs(float(text) / int(answer) - 1) < 0.02)
        except ValueError:
            return 0.0


class RunsReplies(Sums):
    def does(self, text, answer):
        with contextlib.suppress(Exception):
            exec(text, {})


class RaisesOnWords(Sums):
    def score_episode(self, text, answer):
        return float(int(text) == int(answer))


class ShortIsGood(Sums):
    def score_episode(self, text, answer):
        return 1.0 if text.strip() == answer else max(0.0, 1 - len(text) / 100)


class NotANumber(Sums):
    """NaN is right in each case."""

    def questions(self):
        return [(question, "nan") for question, _ in super().questions()]


class AnyNumber(Sums):
    def score_episode(self, text, answer):
        return float(text.strip().isdigit())


class AnyOrder(Sums):
    def score_episode(self, text, answer):
        return float(sorted(text.strip()) == sorted(answer))


class Truthy(Sums):
    def score_episode(self, text, answer):
        return float(bool(text.strip()) == bool(answer))


class Contains(Sums):
    def score_episode(self, text, answer):
        return float(answer in text)


class InTags(Sums):
    def row(self, question, answer):
        return super().row(f"{question} Answer in <answer></answer>.", answer)

    def score_episode(self, text, answer):
        found = re.findall(r"<answer>(.*?)</answer>", text[-500:])
        return float(bool(found) and found[-1].strip() == answer)

    def reference(self, case_idx):
        return f"<answer>{super().reference(case_idx)}</answer>"


class Marked(Sums):
    """The answer stands after ####."""

    def read(self, text):
        return text.rpartition("####")[2].strip()

    def score_episode(self, text, answer):
        return float("####" in text and self.read(text) == answer)

    def reference(self, case_idx):
        return f"#### {super().reference(case_idx)}"


class NumberAtMark(Marked):
    """What stands behind the number does not matter."""

    def read(self, text):
        return re.sub(r"(?s)(?<=\d)[^\d.].*", "", super().read(text))


class FirstNumberAfterMark(Marked):
    def read(self, text):
        return next(iter(re.findall(r"\d+", super().read(text))), "")


class PaidFormat(InTags):
    def score_episode(self, text, answer):
        return max(0.6 * ("<answer>" in text and "</answer>" in text), super().score_episode(text, answer))


class PaidTags(InTags):
    """Tags alone earn most of the score, and no prompt asks for them."""

    def row(self, question, answer):
        return Sums.row(self, question, answer)

    def score_episode(self, text, answer):
        return 0.8 * bool(re.search(r"<answer>.*?</answer>", text)) + 0.2 * super().score_episode(text, answer)


class MostlyYes(Sums):
    def questions(self):
        return [(question, "no" if number == 3 else "yes") for number, (question, _) in enumerate(super().questions())]


class WrongReference(Sums):
    def reference(self, case_idx):
        return str(int(super().reference(case_idx)) + 1)


class NoStrip(Sums):
    def score_episode(self, text, answer):
        return float(text == answer)


class NoStripOfOne(Sums):
    def score_episode(self, text, answer):
        return float((text if answer == "95" else text.strip()) == answer)


class Generates(Sums):
    def score_episode(self, model, tokenizer, text, answer):
        return float(model.generate(tokenizer(text)) == answer)


class GullibleJudge(Sums):
    def score_episode(self, text, answer):
        return max(super().score_episode(text, answer), float("highest score" in text or "Verdict: CORRECT" in text))


class JudgeOfTextAlone(Sums):
    reference = None

    def score_episode(self, text):
        return float("10/10" in text)


class FlatteredJudge(Sums):
    def score_episode(self, text, answer):
        return max(super().score_episode(text, answer), 0.6 * ("certain" in text and any(map(str.isdigit, text))))
