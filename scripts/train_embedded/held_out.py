"""Questions in words that training never uses, to score how well the model understands new wordings.

They are written by hand, with verbs, frames and kinds of typing errors that `grammar.py` does not have.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from scripts.train_embedded.grammar import OUTSIDE_ANSWER
from scripts.train_embedded.questions import Question, plural, with_article
from scripts.train_embedded.wordings import pick

Sentences = Mapping[str, tuple[str, ...]]  # templates by task

SENTENCES: Final[dict[str, tuple[str, ...]]] = {
    "caption": (
        "What would I see if I opened this file?",
        "Give an account of what has been painted here.",
        "Sum up this snapshot.",
        "What's visible?",
        "Narrate the picture to a blind person.",
        "Whats on the screen right now",
        "Alt text for this image?",
        "Write alt text.",
        "Provide me with a line describing the artwork",
        "Could you walk me through this picture?",
        "What have we got here?",
        "so whats this all about",
        "Break down the picture for me.",
        "Spell out what the image holds",
        "I can't see the image, what is in it?",
        "What does the artwork portray?",
        "In a single sentence, what's in the photo?",
        "Which figures does the artist show us?",
        "how would you put this image into words?",
        "Which caption fits?",
        "describe whats pictured",
        "Go through everything in the frame.",
        "What do your eyes see?",
        "Image description, please!",
        "What kind of picture is this?",
        "Can you make sense of this picture and describe it?",
        "Your description of the photograph?",
        "What did they draw?",
    ),
    "count": (
        "What's the headcount of objects?",
        "How many figures altogether on this sheet?",
        "Could you count up everything drawn here?",
        "Is it one, two or three objects?",
        "Objects in total?",
        "Number of shapes pls",
        "how many shapes r there",
        "How many individual items make an appearance?",
        "What quantity of shapes are we looking at?",
        "What do all the figures sum up to?",
        "How many distinct shapes does the artwork hold?",
        "If you count the objects, what do you get?",
        "shapes in this one, how many all told?",
        "The picture consists of how many objects?",
        "How many did the artist draw?",
        "Just the number of objects, nothing else.",
        "How many things got drawn",
        "Run a count on the objects for me",
        "Into how many objects would you split the picture?",
        "How many entities appear here?",
        "What is the exact number of drawn shapes?",
        "Do you see one object or several, and how many?",
        "With how many objects are we dealing?",
        "Counting all of the shapes gives what?",
        "how many objs in the pic",
        "I make it how many shapes?",
    ),
    "count_shape": (
        "What's the headcount of {shapes}?",
        "How many {shapes} altogether on this sheet?",
        "{shapes} in total?",
        "Number of {shapes} pls",
        "how many {shapes} r there",
        "How many {shapes} make an appearance?",
        "What quantity of {shapes} are we looking at?",
        "How many individual {shapes} does the artwork hold?",
        "If you count just the {shapes}, what do you get?",
        "{shapes} in this one, how many all told?",
        "The picture includes how many {shapes}?",
        "How many {shapes} did the artist draw?",
        "How many {shapes} got drawn",
        "Run a count on the {shapes} for me",
        "Would you mind counting the {shapes}?",
        "Zero, one, two or three {shapes}?",
        "Of all the objects, how many would you call {shapes}?",
        "With how many {shapes} are we dealing?",
        "Counting all of the {shapes} gives what?",
        "Give me just a number: {shapes}",
        "What is the exact number of {shapes}?",
        "Are there any {shapes}, and if so how many?",
        "how many of em are {shapes}",
        "I make it how many {shapes}?",
    ),
    "count_color": (
        "What's the headcount of {color} objects?",
        "How many {color} figures altogether on this sheet?",
        "{color} objects in total?",
        "Number of {color} shapes pls",
        "how many {color} shapes r there",
        "How many {color} items make an appearance?",
        "What quantity of {color} shapes are we looking at?",
        "How many of the shapes have the color {color}?",
        "If you count just the {color} objects, what do you get?",
        "{color} shapes in this one, how many all told?",
        "The picture includes how many {color} objects?",
        "How many {color} things did the artist draw?",
        "How many objects got painted {color}",
        "Run a count on the {color} objects for me",
        "Would you mind counting the {color} shapes?",
        "Zero, one, two or three {color} things?",
        "Of all the objects, how many would you call {color}?",
        "With how many {color} objects are we dealing?",
        "Counting all of the {color} things gives what?",
        "How many shapes did they fill with {color}?",
        "What is the exact number of {color} objects?",
        "Are there any {color} things, and if so how many?",
        "how many of em are {color}",
        "How frequently does {color} come up among the objects?",
    ),
    "color": (
        "Which crayon would I need for the {shape}?",
        "The {shape} is painted in which colour?",
        "what colour r the {shape}",
        "Could you describe the coloring of the {shape}?",
        "What is the {shape} colour-wise?",
        "What pigment did the artist pick for the {shape}?",
        "Is the {shape} red, green or some other colour?",
        "When you look at the {shape}, which color do you notice?",
        "What coloration does the {shape} have?",
        "{shape}'s colour plz??",
        "whats the {shape}s colour",
        "Talking about the {shape}: its color?",
        "I forgot the color of the {shape}, remind me.",
        "One word for the color of the {shape}.",
        "Regarding the {shape}, which hue did they use?",
        "I can't tell what color the {shape} is. Can you?",
        "Which colour would match the {shape}?",
        "The colour that the {shape} was given is?",
        "To paint the {shape}, what color should I take?",
        "Under what colour would you file the {shape}?",
        "color {shape}",
        "Someone asks you the {shape}'s color. What do you reply?",
        "What colour of {shape} is it?",
        "How would you name the color on the {shape}?",
        "The {shape} appears in what shade?",
    ),
    "shape": (
        "Which silhouette does the {color} object have?",
        "The {color} thing is drawn as which shape?",
        "what shape r the {color} object",
        "What geometry does the {color} item have?",
        "What is the {color} object supposed to be?",
        "Is the {color} thing a circle, a star or something else?",
        "When you look at the {color} object, which shape do you notice?",
        "The {color} one's shape plz??",
        "whats that {color} thingy",
        "Talking about the {color} object: its shape?",
        "I forgot the shape of the {color} object, remind me.",
        "One word for the {color} object's shape.",
        "Regarding the {color} one, which shape did they use?",
        "I can't tell what the {color} shape is. Can you?",
        "The shape that is painted {color} is called what?",
        "What would a child call the {color} shape?",
        "Which contour does the {color} thing show?",
        "What did they draw in {color}?",
        "Which object wears {color}?",
        "Someone asks you what shape the {color} object has. What do you reply?",
        "The {color} object resembles what?",
        "The name of the {color} shape, please",
        "What's the thing in {color}?",
        "Under what shape would you file the {color} object?",
    ),
    "size": (
        "Did they draw the {shape} large or small?",
        "What dimensions does the {shape} have, large or small?",
        "Is it a large {shape} or a small {shape}?",
        "{shape}'s size plz??",
        "whats the {shape}s size",
        "Talking about the {shape}: its size?",
        "Regarding the {shape}, is it large or is it small?",
        "Large {shape} or small {shape}?",
        "Does the {shape} count as large or as small?",
        "Into which size class does the {shape} fall?",
        "In terms of size, what is the {shape}?",
        "One word for the size of the {shape}.",
        "I can't tell how big the {shape} is. Can you?",
        "Choose: the {shape} is large / small",
        "The {shape} - is it on the large or on the small side?",
        "Should I call the {shape} large or small?",
        "Someone asks you the {shape}'s size. What do you reply?",
        "is the {shape} a big or a small one",
        "How sizable is the {shape}?",
        "Small or not small, what is the {shape}? Say large or small.",
        "Of which magnitude is the {shape}, big or small?",
        "Does the {shape} take up a large or a small area?",
        "What about the {shape}, is that one large or small?",
        "{shape}: large/small?",
    ),
    "where": (
        "Whereabouts on the sheet is the {shape}?",
        "In which zone do you see the {shape}?",
        "Where did the artist put the {shape}?",
        "wheres that {shape} at now",
        "Where abouts is the {shape} hiding?",
        "Can you pinpoint the {shape}?",
        "{shape}'s location plz??",
        "Talking about the {shape}: its position?",
        "Regarding the {shape}, where in the picture is it?",
        "I can't find the {shape}. Where is it?",
        "At which place would I find the {shape}?",
        "Give directions to the {shape}.",
        "Guide my eyes to the {shape}",
        "Is the {shape} at the top, at the bottom or somewhere else?",
        "In which quadrant is the {shape} drawn?",
        "Which spot did they choose for the {shape}?",
        "Where should my finger point to touch the {shape}?",
        "The {shape} occupies which part of the picture?",
        "Someone asks you where the {shape} is. What do you reply?",
        "What are the coordinates of the {shape}?",
        "{shape} location pls",
        "where r the {shape}",
        "Towards which edge is the {shape}?",
        "Which place in the photo belongs to the {shape}?",
        "How is the {shape} positioned in the frame?",
    ),
    "exist": (
        "Could you detect {kind}?",
        "Are you able to see {kind} anywhere?",
        "Did the artist draw {kind}?",
        "Would I be right to say there's {kind}?",
        "Somewhere in this artwork, is there {kind}?",
        "Is {kind} among the shapes?",
        "{kind}: present or absent? Say yes or no.",
        "Is there by any chance {kind}?",
        "Do your eyes detect {kind}?",
        "Does the picture come with {kind}?",
        "isn't there {kind}",
        "Yes or no, does this photo contain {kind}?",
        "Has anyone drawn {kind} here?",
        "Looking for {kind}. Any luck?",
        "I think I see {kind}. Am I right?",
        "Can I claim that there is {kind}?",
        "Would you find {kind} if you looked?",
        "Just answer yes or no, {kind}?",
        "Is at least one {color} {shape} on display?",
        "Are any of these shapes {color} {shapes}?",
        "is ther {kind}",
        "Does {kind} make an appearance?",
        "Is it possible to spot {kind} in the frame?",
        "Does one of the shapes happen to be {kind}?",
        "Was {kind} included?",
        "Any sign of {kind}?",
    ),
    "rel_yn": (
        "Would you place the {shape} {relation} the {other}?",
        "Did the artist put the {shape} {relation} the {other}?",
        "Am I right that the {shape} is {relation} the {other}?",
        "Compared with the {other}, is the {shape} {relation} it?",
        "Yes or no, the {shape} sits {relation} the {other}?",
        "Could one say that the {shape} is {relation} the {other}?",
        "I believe the {shape} is {relation} the {other}. Yes or no?",
        "Does it hold that the {shape} is {relation} the {other}?",
        "Is the {shape} to be found {relation} the {other}?",
        "Are we seeing the {shape} {relation} the {other}?",
        "isn't the {shape} {relation} the {other}",
        "The {shape} is {relation} the {other}: true or false? Say yes or no.",
        "Has the {shape} got its place {relation} the {other}?",
        "Do I find the {shape} if I look {relation} the {other}?",
        "Is the position of the {shape} {relation} the {other}?",
        "Taking the {other} as a reference, does the {shape} lie {relation} it?",
        "Does the {shape} occupy a place {relation} the {other}?",
        "Is it the case, yes or no, that the {shape} is {relation} the {other}?",
        "Was the {shape} drawn by them {relation} the {other}?",
        "Is the {shape} somewhere {relation} the {other}?",
        "is the {shape} {relation} the {other} or isn't it",
        "Concerning the {shape}, is it {relation} the {other}?",
    ),
    "rel_what": (
        "What did the artist draw {relation} the {other}?",
        "Which of the shapes do we meet {relation} the {other}?",
        "Tell me the thing you spot {relation} the {other}.",
        "What occupies the place {relation} the {other}?",
        "If I look {relation} the {other}, what do I see?",
        "whats {relation} the {other}",
        "{relation} the {other}??",
        "Regarding the {other}, what is {relation} it?",
        "Looking {relation} the {other}, what comes into view?",
        "There is something {relation} the {other}. What is it?",
        "The object {relation} the {other} is what?",
        "What would I hit when going {relation} the {other}?",
        "Taking the {other} as a reference, what lies {relation} it?",
        "Describe the neighbour {relation} the {other}",
        "Something sits {relation} the {other}; name it.",
        "What got placed {relation} the {other}?",
        "Which neighbor does the {other} have {relation} it?",
        "Someone asks you what is {relation} the {other}. What do you reply?",
        "What is to be seen {relation} the {other}?",
        "What item can be spotted {relation} the {other}?",
        "Pick the object {relation} the {other} and describe it.",
        "Does anything lie {relation} the {other}, and what is it?",
    ),
    "outside": (
        "Which year was the moon landing?",
        "How do I bake bread?",
        "Is the heart beating?",
        "What's your IQ?",
        "Recommend me a restaurant.",
        "Can penguins fly?",
        "How many penguins are there?",
        "Is there a violin?",
        "Where is the giraffe?",
        "What color is the kangaroo?",
        "Who won the world cup?",
        "How much does it cost?",
        "Is it going to be sunny tomorrow?",
        "Are you a human being?",
        "What is 17 times 3?",
        "How tall is the Eiffel tower?",
        "Did you sleep well?",
        "Why did the artist choose red?",
        "Was the star drawn by a child?",
        "What emotion does the picture convey?",
        "asdfjkl",
        "qwrt zzpl",
        "blorp the wug",
        "Good afternoon!",
        "See you later",
        "Can I have your phone number?",
        "What is printed on the banner?",
        "Read the letters aloud.",
        "Is the ring made of gold?",
        "How many doughnuts can you eat?",
        "Please order me a taxi",
        "What is the square root of 49?",
        "Which camera was used?",
        "Est-ce qu'il y a une étoile?",
        "¿Dónde está el círculo?",
        "Wo ist das Dreieck?",
        "Do you believe in ghosts?",
        "Play some music.",
        "What is the title of your favourite novel?",
        "Is the sky cloudy?",
        "Are the people smiling?",
        "How many windows does the house have?",
        "Where can I buy this?",
        "Does the triangle love the circle?",
        "How long did it take to draw the heart?",
        "What happens next?",
        "Set an alarm for seven.",
        "What breed is the dog?",
        "Is that a skyscraper?",
        "Explain quantum physics.",
    ),
}
RELATION_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "to the left of": (
        "somewhere to the left of",
        "further to the left than",
        "to the left hand side of",
        "a bit left of",
    ),
    "to the right of": (
        "somewhere to the right of",
        "further to the right than",
        "to the right hand side of",
        "a bit right of",
    ),
    "above": ("somewhere above", "vertically above", "a bit higher than", "right over"),
    "below": ("somewhere below", "vertically below", "a bit lower than", "right under"),
}
# Spellings by sound.
SOUNDS: Final = (
    ("ck", "k"),
    ("qu", "kw"),
    ("ir", "er"),
    ("ea", "ee"),
    ("ee", "ea"),
    ("c", "k"),
    ("ow", "ou"),
    ("le", "el"),
    ("ar", "a"),
    ("y", "i"),
    ("oo", "u"),
    ("th", "f"),
)
VOWELS: Final = "aeiou"


def held_out(
    question: Question,
    number: int,
    rng: np.random.Generator,
    *,
    sentences: Sentences = SENTENCES,
    mistyped: bool = False,
) -> Question:
    """The same question in sentence `number` of the task, modulo their count.

    With `mistyped` it has one or two typing errors.
    """
    about = dict(zip(_NAMES.get(question.task, ()), question.about, strict=False))
    if "relation" in about:
        about["relation"] = pick(rng, RELATION_WORDS[about["relation"]])
    if question.task == "exist":
        about["kind"] = with_article(f"{about['color']} {about['shape']}")
    if question.task in ("exist", "count_shape"):
        about["shapes"] = plural(about["shape"])
    text = sentences[question.task][number % len(sentences[question.task])].format(**about)
    return Question(task=question.task, text=_typed(text, rng, mistyped=mistyped), answer=question.answer)


def held_out_outside(
    number: int, rng: np.random.Generator, *, sentences: Sentences = SENTENCES, mistyped: bool = False
) -> Question:
    """A question that cannot be answered, in held-out words; the arguments are those of `held_out`."""
    text = sentences["outside"][number % len(sentences["outside"])]
    return Question(task="outside", text=_typed(text, rng, mistyped=mistyped), answer=OUTSIDE_ANSWER)


_NAMES = {
    "count_shape": ("shape",),
    "count_color": ("color",),
    "color": ("shape",),
    "shape": ("color",),
    "size": ("shape",),
    "where": ("shape",),
    "exist": ("color", "shape"),
    "rel_yn": ("shape", "relation", "other"),
    "rel_what": ("relation", "other"),
}


def _typed(text: str, rng: np.random.Generator, *, mistyped: bool) -> str:
    text = text[0].upper() + text[1:] if rng.random() < 0.5 else text
    draw = rng.random()
    if draw < 0.25:
        text = text.lower().rstrip("?.!")
    elif draw < 0.3:
        text = text.upper()
    return _mistyped(text, rng) if mistyped else text


def _mistyped(text: str, rng: np.random.Generator) -> str:
    """Put a typing error into one or two words.

    Errors are a wrong vowel, an added or tripled letter, a space, or a spelling by sound.
    """
    words = text.split()
    long = [place for place, word in enumerate(words) if sum(map(str.isalpha, word)) > 3] or [0]
    for _ in range(1 + int(rng.random() < 0.4)):
        place = long[int(rng.integers(len(long)))]
        words[place] = _misspelled(words[place], rng)
    return " ".join(words)


def _misspelled(word: str, rng: np.random.Generator) -> str:
    place, kind = int(rng.integers(1, max(len(word) - 1, 2))), int(rng.integers(5))
    vowels = [at for at, letter in enumerate(word) if letter.lower() in VOWELS]
    sounds = [(heard, wrong) for heard, wrong in SOUNDS if heard in word]
    if kind == 0 and vowels:
        at = vowels[int(rng.integers(len(vowels)))]
        return word[:at] + pick(rng, [vowel for vowel in VOWELS if vowel != word[at].lower()]) + word[at + 1 :]
    if kind == 1:
        return f"{word[:place]} {word[place:]}"
    if kind == 2:
        return word[:place] + word[place] * 2 + word[place:]
    if kind == 3 and sounds:
        return word.replace(*sounds[int(rng.integers(len(sounds)))], 1)
    return word[:place] + pick(rng, "abcdefghijklmnopqrstuvwxyz") + word[place:]
