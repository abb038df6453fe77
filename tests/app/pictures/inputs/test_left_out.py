"""What is left out is counted by kind, and the note has an example of each."""

from llama_adapter.app.pictures.inputs.left_out import LeftOut


def test_a_note_has_the_number_and_the_first_place_of_each_kind() -> None:
    one, other = LeftOut(), LeftOut()
    assert not one
    one.add("pictures without text", "b.png")
    one.add("pictures without text", "c.png", number=1_200)
    other.add("pictures without text", "a.png")
    other.add("texts without picture", "a\n.txt")
    one.extend(other)

    assert one.note() == "pictures without text: 1,202 (first: b.png), texts without picture: 1 (first: a\\n.txt)"
