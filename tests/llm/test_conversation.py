"""The conversation template, in the form of the published chat demo."""

from llama_adapter.llm.conversation import format_conversation

SYSTEM = (
    "A chat between a curious human and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the human's questions."
)


def test_a_question_follows_the_example() -> None:
    system, example, answer, question, rest = format_conversation([("user", "Why?")]).split("###")

    assert system == SYSTEM
    assert example == "Human: What are the key differences between renewable and non-renewable energy sources?"
    assert answer.startswith("Assistant: Renewable energy sources are those that can be replenished naturally in a ")
    assert answer.endswith("and their depletion can lead to economic and social instability.\n")
    assert [line[:3] for line in answer.splitlines()[1:]] == ["1. ", "2. ", "3. ", "4. ", "5. ", "6. "]
    assert (question, rest) == ("Human: Why?", "Assistant:")


def test_turns_follow_in_their_order_and_empty_ones_are_left_out() -> None:
    turns = [("user", "Hello"), ("assistant", "Hi."), ("user", ""), ("user", "Why?")]

    assert format_conversation(turns).split("###")[3:] == [  # type: ignore[arg-type]
        "Human: Hello",
        "Assistant: Hi.",
        "Human: Why?",
        "Assistant:",
    ]


def test_texts_of_the_system_replace_the_first_sentences() -> None:
    text = format_conversation([("system", "Be brief."), ("system", "Be kind."), ("user", "Why?")])

    assert text.startswith("Be brief.\nBe kind.###Human: What are the key")
    assert SYSTEM not in text
