"""``fastgen chat``, on a stub that remembers the conversations, and on a built-in model."""

from __future__ import annotations

import pytest

from fastgen.errors import InvalidArgumentError, RequestTooLargeError


def say(user: str) -> dict[str, str]:
    return {"role": "user", "content": user}


def answer(assistant: str) -> dict[str, str]:
    return {"role": "assistant", "content": assistant}


def test_each_line_of_stdin_is_a_turn_of_one_conversation(run, stub) -> None:
    done = run("chat", "m", "--seed", "3", "--dtype", "float32", stdin="abc\n\n  def \n")
    assert (done.status, done.out, done.err) == (0, "cba\nfed\n", "")
    assert stub.asked == [[say("abc")], [say("abc"), answer("cba"), say("def")]]
    assert stub.loaded == ("m", {"dtype": "float32"})
    assert stub.fields == {"seed": 3}
    assert stub.num_streams_closed == 2
    assert stub.closed


def test_the_last_line_needs_no_newline(run, stub) -> None:
    assert run("chat", "m", stdin="abc").out == "cba\n"
    assert run("chat", "m", stdin="").out == ""


def test_a_model_that_cannot_chat_says_so_before_the_first_turn(run, stub) -> None:
    stub.cannot_chat = InvalidArgumentError("it has no chat template")
    done = run("chat", "m", stdin="")
    assert (done.status, done.out, done.err) == (1, "", "fastgen: it has no chat template\n")
    assert stub.closed


def test_the_system_message_opens_every_conversation(run, stub) -> None:
    run("chat", "m", "--system", "be brief", stdin="a\n/reset\nb\n")
    opening = {"role": "system", "content": "be brief"}
    assert stub.asked == [[opening, say("a")], [opening, say("b")]]


def test_exit_ends_it(run, stub) -> None:
    done = run("chat", "m", stdin="ab\n/exit\ncd\n")
    assert (done.status, done.out) == (0, "ba\n")
    assert len(stub.asked) == 1


def test_an_unknown_command_is_not_sent_to_the_model(run, stub) -> None:
    done = run("chat", "m", stdin="/rest now\nab\n")
    assert done.err.startswith("unknown command /rest: /reset starts over")
    assert stub.asked == [[say("ab")]]


def test_on_a_terminal_it_prompts_and_ctrl_d_leaves(run, stub) -> None:
    done = run("chat", "m", stdin="ab\n", terminal=True)
    help_line, *rest = done.out.splitlines()
    assert "Ctrl-D leaves" in help_line
    assert rest == ["> ba", "> "]
    assert done.status == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(run, stub) -> None:
    stub.answers["more please"] = ["Once ", "upon", KeyboardInterrupt(), "never"]
    done = run("chat", "m", stdin="more please\nmore\n")
    assert (done.status, done.out) == (0, "Once upon\nerom\n")
    assert stub.asked[1] == [say("more please"), answer("Once upon"), say("more")]
    assert stub.num_streams_closed == 2


class InterruptedLines:
    """Stands for ``input`` on a terminal where Ctrl-C is pressed at the second prompt."""

    def __init__(self) -> None:
        self.lines = iter(["ab", KeyboardInterrupt(), "cd"])

    def __call__(self, prompt: str = "") -> str:
        line = next(self.lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line


def test_ctrl_c_at_the_prompt_only_clears_the_line(run, stub, monkeypatch) -> None:
    monkeypatch.setattr("builtins.input", InterruptedLines())
    assert run("chat", "m", terminal=True).status == 0
    assert [asked[-1] for asked in stub.asked] == [say("ab"), say("cd")]


def test_ctrl_c_ends_a_piped_conversation(run, stub, monkeypatch) -> None:
    monkeypatch.setattr("builtins.input", InterruptedLines())
    assert run("chat", "m").status == 130
    assert len(stub.asked) == 1


def test_a_turn_that_fails_is_forgotten_on_a_terminal(run, stub) -> None:
    stub.answers["long"] = InvalidArgumentError("the template refuses it")
    done = run("chat", "m", stdin="ab\nlong\ncd\n", terminal=True)
    assert done.status == 0
    assert done.err == "fastgen: the template refuses it\n"
    assert stub.asked[2] == [say("ab"), answer("ba"), say("cd")]


def test_an_answer_nobody_bounded_is_cut_to_what_the_context_has_left(run, stub, monkeypatch) -> None:
    bounds = []
    stream_chat = stub.stream_chat

    def refuses_long_ones(messages, **fields):
        bounds.append(fields.get("max_new_tokens"))
        if fields.get("max_new_tokens", 128) > 9:
            raise RequestTooLargeError("too long", room=9)
        return stream_chat(messages, **fields)

    monkeypatch.setattr(stub, "stream_chat", refuses_long_ones)
    assert run("chat", "m", stdin="ab\n").status == 0
    assert bounds == [None, 9]
    assert run("chat", "m", "--max-new-tokens", "50", stdin="ab\n").err == "fastgen: too long\n"


def test_a_conversation_that_fills_the_context_says_what_to_do(run, stub) -> None:
    stub.answers["long"] = RequestTooLargeError("too long", room=0)
    done = run("chat", "m", stdin="long\n", terminal=True)
    assert done.err == "fastgen: the conversation fills the context of the model; /reset starts over\n"


def test_a_turn_that_fails_on_its_way_is_forgotten_too(run, stub) -> None:
    stub.answers["bad"] = stub.make_output("so far", finish_reason="error", error="logits became NaN")
    done = run("chat", "m", stdin="bad\ncd\n", terminal=True)
    assert done.err == "fastgen: logits became NaN\n"
    assert stub.asked[1] == [say("cd")]


def test_a_turn_that_fails_ends_a_piped_conversation(run, stub) -> None:
    stub.answers["long"] = InvalidArgumentError("the template refuses it")
    done = run("chat", "m", stdin="long\ncd\n")
    assert done.status == 1
    assert done.err == "fastgen: the template refuses it\n"
    assert len(stub.asked) == 1
    assert stub.closed


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([], b"\xff\n", "not UTF-8"),
        (["--system", "\udcff"], b"", "not UTF-8"),
        (["-n", "2"], b"", "-n"),
        (["extra"], b"", "extra"),
    ],
)
def test_wrong_usage_is_status_2(run, stub, arguments, stdin, message) -> None:
    done = run("chat", "m", *arguments, stdin=stdin)
    assert (done.status, done.out) == (2, "")
    assert message in done.err


def test_a_built_in_model_answers_and_remembers(run) -> None:
    arguments = ("chat", "tiny-llama", "--temperature", "0", "--max-new-tokens", "24")
    two_turns = run(*arguments, stdin="Hello!\nHello!\n")
    assert (two_turns.status, two_turns.err) == (0, "")
    first = run(*arguments, stdin="Hello!\n").out
    assert first.strip()
    assert two_turns.out.startswith(first)
    assert run(*arguments, stdin="Hello!\n/reset\nHello!\n").out == first * 2
