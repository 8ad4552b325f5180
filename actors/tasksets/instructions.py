"""Instructions that a program can check: 'Write briefly about rain. Use at most 8 words. Include the word "river".'

Every prompt names a topic, which the answer must name too, and gives one to three instructions of ten kinds. A task's answer is
a JSON list of [kind, argument], as `streams.scores.instructions` checks it.

    dev           topics, words, keys and phrases that training leaves out: every eighth
    held-out      a vocabulary of its own; the last prompts by id ("unseen-…", a share of UNSEEN_SHARE) combine a pair of kinds
                  that the other splits never combine

Demonstrations show each of the kinds SHOWN alone, because a small model hardly ever follows these by chance; combinations are
learned from the score. The same seed gives the same rows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from actors.tasksets.taskset import DEV, HELD_OUT, TRAIN, VALIDATION, Demonstration, write_rows
from schemas import Message, Task

UNSEEN_SHARE = 0.4
SIZES = (0.25, 0.45, 0.30)  # shares of prompts with one, two and three instructions
TRAIN_SIZES = (0.10, 0.45, 0.45)  # answers to one instruction soon score the same: such a group teaches nothing

KINDS = ("word", "max_words", "sentences", "lower_case", "no_commas", "ending", "start", "bullets", "quotes", "json")
SHOWN = ("sentences", "lower_case", "ending", "start", "bullets", "quotes", "json")
CONFLICTS = frozenset(
    frozenset(pair)
    for pair in (
        *(("json", kind) for kind in ("sentences", "bullets", "quotes", "start", "ending", "no_commas", "max_words")),
        *(("bullets", kind) for kind in ("sentences", "start", "quotes", "ending", "max_words")),
        ("quotes", "start"),
        ("quotes", "ending"),
        ("sentences", "ending"),
    )
)
UNSEEN_PAIRS = frozenset(
    frozenset(pair.split("+"))
    for pair in (
        "lower_case+word", "no_commas+ending", "max_words+start", "sentences+quotes", "bullets+no_commas", "json+lower_case",
    )
)  # fmt: skip

TOPICS = """
apple bread cheese coffee honey lemon soup rice butter pasta salad sugar pepper onion carrot tomato potato banana orange cherry
grape pear plum melon garlic ginger mint basil olive salt chocolate cake tea milk juice water rain snow wind storm cloud
thunder fog ice frost river lake ocean island beach mountain valley forest desert meadow garden flower rose tulip grass tree
oak pine leaf root seed moss fern cactus bee ant spider butterfly beetle worm snail frog turtle snake lizard fish shark whale
dolphin seal crab octopus bird eagle owl crow swan duck chicken goose parrot penguin horse cow sheep goat pig dog cat mouse
rabbit fox wolf bear deer lion tiger elephant giraffe monkey zebra camel kangaroo bat house door window roof wall floor kitchen
chair table bed lamp mirror clock carpet curtain pillow blanket broom bucket ladder hammer nail saw rope knife fork spoon plate
cup bottle pot oven stove fridge car bus train bicycle ship boat plane rocket bridge road tunnel harbour station airport city
village market school library museum hospital theatre church castle tower farm factory office bank hotel park music song piano
guitar violin drum flute dance painting drawing photo film story poem book letter newspaper radio phone computer robot camera
battery football tennis chess swimming running skiing sailing climbing yoga sleep breakfast lunch dinner picnic birthday
holiday winter summer spring autumn morning evening night sun moon star planet comet sky fire smoke stone sand gold silver iron
glass wood paper wool cotton silk leather shoe hat coat scarf glove sock shirt button needle thread money coin doctor teacher
baker farmer sailor painter pilot nurse
"""
HELD_OUT_TOPICS = """
peach mango spinach mushroom pizza yoghurt waffle peanut cinnamon hail rainbow volcano glacier canyon waterfall cave swamp
daisy sunflower ivy bamboo willow mosquito dragonfly ladybird toad salmon jellyfish lobster pigeon sparrow flamingo ostrich
donkey hedgehog squirrel otter panda leopard hamster balcony cellar sofa candle towel umbrella scissors kettle teapot tram
truck helicopter canoe lighthouse windmill pharmacy stadium circus trumpet harp opera sculpture novel diary magazine television
satellite telescope calculator basketball hockey surfing fishing karate juggling carnival wedding midnight noon galaxy eclipse
copper marble velvet boot belt jacket ring wallet judge plumber firefighter gardener barber carpenter
"""
WORDS = """
bright quiet yellow gentle strong simple modern ancient heavy narrow little golden round fresh useful common famous careful
friend family people nature history science voice memory future country journey secret moment reason world power silence often
always together slowly usually early never again forever everywhere maybe inside above
"""
HELD_OUT_WORDS = """
purple clever hollow smooth lucky brave tidy distant balance culture treasure shadow neighbour wisdom pattern harmony promise
rarely quickly outside seldom tomorrow suddenly nearby
"""
STARTS = "today yes here every many sometimes look think imagine long most why everyone now please once all with"
HELD_OUT_STARTS = "well remember indeed there few children actually plainly lately truly"
KEYS = "name colour size use place kind taste age price shape sound smell weight season owner origin"
HELD_OUT_KEYS = "title material number speed author purpose height mood"
ENDINGS = (
    "that is all", "the end", "good luck", "have a nice day", "and so on", "as always", "see you soon", "for sure", "my friend",
    "so they say", "every day", "just try it", "in the end", "thank you", "what a joy",
)  # fmt: skip
HELD_OUT_ENDINGS = (
    "take care", "you never know", "believe me", "until tomorrow", "as you know", "I promise", "no doubt",
)  # fmt: skip
FUNCTION_WORDS = (
    "with for by from after before about near it you me we us they this that then than but and or so if not up out over"
)

SAID = (
    "Many people like {}.", "I often think about {}.", "You can say a lot about {}.", "My day begins with {}.",
    "Nothing is quite like {}.", "We talked about {} for an hour.", "A story about {} never gets old.",
    "You can learn a lot from {}.", "Some songs are about {}.", "My sister knows everything about {}.", "I like {}.",
    "Look at {}.", "Think of {}.", "{} is nice.", "Everyone knows {}.", "We all need {}.",
)  # fmt: skip


def vocabulary(split: str) -> dict[str, Sequence[str]]:
    """Topics and, by kind, the words, keys and fixed endings that its instructions name. No two splits share an entry."""
    if split == HELD_OUT:
        texts = HELD_OUT_TOPICS, HELD_OUT_WORDS, HELD_OUT_STARTS, HELD_OUT_KEYS
        topics, words, starts, keys = (text.split() for text in texts)
        return {"topic": topics, "word": words, "start": starts, "json": keys, "ending": HELD_OUT_ENDINGS}
    topics, words, starts, keys, endings = (
        [entry for number, entry in enumerate(entries) if (number % 8 == 0) == (split == DEV)]
        for entries in (TOPICS.split(), WORDS.split(), STARTS.split(), KEYS.split(), ENDINGS)
    )
    return {"topic": topics, "word": words + topics, "start": starts + words + topics, "json": keys, "ending": endings}


def instructions(*, seed: int = 0, num_train: int = 3000, num_dev: int = 64, num_held_out: int = 200) -> Iterator[Task]:
    """Prompts with checkable instructions, in the splits "held-out", "dev" and "train". num_train: Prompts in split "train".
    num_dev: Prompts in split "dev". num_held_out: Prompts in split "held-out".
    """
    random, seen = Random(f"instructions/{seed}"), set[str]()
    num_unseen = round(UNSEEN_SHARE * num_held_out)
    for split, name, count in (
        (HELD_OUT, "held", num_held_out - num_unseen),
        (HELD_OUT, "unseen", num_unseen),
        (DEV, DEV, num_dev),
        (TRAIN, TRAIN, num_train),
    ):
        entries, number = vocabulary(split), 0
        while number < count:
            task = draw(random, f"{name}-{number:04d}", split, entries, unseen=name == "unseen")
            if task.messages[0].content not in seen:
                seen.add(task.messages[0].content)
                number += 1
                yield task


def draw(random: Random, id: str, split: str, entries: Mapping[str, Sequence[str]], *, unseen: bool) -> Task:
    """A task. entries: vocabulary of the split. unseen: its kinds include a pair of UNSEEN_PAIRS; else none."""
    topic = random.choice(entries["topic"])
    among = random.choice(KINDS) if split == TRAIN else ""  # else kinds that go with few others, such as json, are rare
    kinds = _kinds(random, TRAIN_SIZES if split == TRAIN else SIZES, unseen, among)
    rules: list[tuple[str, object]] = [("word", topic)]
    sentences = [f"Write briefly about {topic}."]
    for kind in kinds:
        argument, sentence = instruction(kind, random, entries, taken=topic)
        rules.append((kind, argument))
        sentences.append(sentence)
    return Task(
        id=id,
        messages=(Message(role="user", content=" ".join(sentences)),),
        answer=msgspec.json.encode(rules).decode(),
        split=split,
        meta={"kinds": "+".join(sorted(kinds))},
    )


def _kinds(random: Random, sizes: Sequence[float], unseen: bool, among: str) -> Sequence[str]:
    """One to three kinds that go together, in any order. sizes: shares of one, two and three. among: one of them, or ""."""
    while True:
        size = random.choices((1, 2, 3), sizes)[0]
        kinds = random.sample(KINDS, size)
        pairs = {frozenset(pair) for pair in combinations(kinds, 2)}
        if not pairs & CONFLICTS and bool(pairs & UNSEEN_PAIRS) == unseen and (not among or among in kinds):
            return kinds


def instruction(kind: str, random: Random, entries: Mapping[str, Sequence[str]], *, taken: str) -> tuple[object, str]:
    """Return the argument of an instruction, and its sentence in a prompt. taken: word to leave out of the draw."""
    among = [entry for entry in entries.get(kind, ()) if entry != taken]
    match kind:
        case "word":
            word = random.choice(among)
            return word, random.choice((f'Include the word "{word}".', f'Use the word "{word}".'))
        case "max_words":
            most = random.randint(8, 15)
            return most, random.choice((f"Use at most {most} words.", f"Write no more than {most} words."))
        case "sentences":
            count = random.randint(1, 3)
            return count, f"Write exactly {('one sentence', 'two sentences', 'three sentences')[count - 1]}."
        case "lower_case":
            return True, random.choice(("Use only lower case letters.", "Do not use capital letters."))
        case "no_commas":
            return True, random.choice(("Do not use commas.", "Avoid commas."))
        case "ending":
            phrase = _ending(random, entries)
            return phrase, f'End with the words "{phrase}".'
        case "start":
            word = random.choice(among)
            return word, random.choice((f'Start with the word "{word}".', f'Begin with the word "{word}".'))
        case "bullets":
            count = random.randint(2, 3)
            return count, f'Write {("two", "three")[count - 2]} bullet points that start with "- ".'
        case "quotes":
            return True, "Put the whole answer in double quotes."
        case _:
            keys = random.sample(among, random.randint(1, 2))
            named = " and ".join(f'"{key}"' for key in keys)
            return keys, f"Answer with a JSON object with the {'keys' if len(keys) > 1 else 'key'} {named}."


def _ending(random: Random, entries: Mapping[str, Sequence[str]]) -> str:
    """A fixed ending or, twice as often but in the held-out split, two or three words that seldom follow each other."""
    fixed = random.choice(entries["ending"])
    if entries["ending"] is HELD_OUT_ENDINGS:
        return fixed
    among = entries["start"], FUNCTION_WORDS.split()
    words = " ".join(random.choice(random.choice(among)) for _ in range(random.randint(2, 3)))
    return random.choice((fixed, words, words))


def demonstrations(*, seed: int = 0, num_train: int = 360, num_validation: int = 36) -> Iterator[Demonstration]:
    """Answers to prompts of one instruction each, about topics of training."""
    random, entries = Random(f"instructions/shown/{seed}"), vocabulary(TRAIN)
    for number in range(num_train + num_validation):
        kind, topic = SHOWN[number % len(SHOWN)], random.choice(entries["topic"])
        argument, asked = instruction(kind, random, entries, taken=topic)
        yield Demonstration(
            id=f"shown-{number:04d}",
            messages=(Message(role="user", content=f"Write briefly about {topic}. {asked}"),),
            response=_shown(kind, argument, topic, random),
            answer=msgspec.json.encode([("word", topic), (kind, argument)]).decode(),
            split=VALIDATION if number >= num_train else TRAIN,
        )


def _said(topic: str, random: Random, *, always_lower: bool = False) -> list[str]:
    """Three sentences; three times in ten in lower case."""
    said = [sentence.format(topic) for sentence in random.sample(SAID, 3)]
    said = [f"{sentence[0].upper()}{sentence[1:]}" for sentence in said]
    if always_lower or random.random() < 0.3:
        said = [sentence.lower() for sentence in said]
    return said


def _shown(kind: str, argument: Any, topic: str, random: Random) -> str:
    """An answer that follows the instruction; its number of sentences and lower case vary where the instruction allows."""
    said = _said(topic, random, always_lower=kind == "lower_case")
    some = " ".join(said[: random.randint(1, 3)])
    match kind:
        case "sentences":
            return " ".join(said[:argument])
        case "lower_case":
            return some
        case "ending":
            return f"{said[0].rstrip('.')}: {argument}."  # no comma: another instruction may forbid it
        case "start":
            return f"{argument if said[0].islower() else argument.capitalize()}: {said[0]}"
        case "bullets":
            return "\n".join(f"- {sentence}" for sentence in said[:argument])
        case "quotes":
            return f'"{some}"'
        case _:
            return json.dumps({key: f"the {key} of {topic}" for key in argument})


TASTE = ("sentences", 1)  # of readers, who do not say it
FORMS = ("Tell me about {}.", "What is nice about {}?", "What should I know about {}?", "Why do people like {}?")


def question(random: Random, split: str = TRAIN) -> tuple[str, str, list[tuple[str, Any]]]:
    """A topic, a question about it without an instruction, and the rules of a liked answer: it names the topic, meets TASTE."""
    topic = random.choice(vocabulary(split)["topic"])
    return topic, random.choice(FORMS).format(topic), [("word", topic), TASTE]


def write_questions(folder: Path, *, seed: int = 0, num_dev: int = 64, num_held_out: int = 100) -> tuple[Path, Path]:
    """Write questions of the splits dev and held-out as tasks.jsonl, and answers of one to three sentences as experts.jsonl."""
    random = Random(f"questions/{seed}")
    tasks: dict[str, Task] = {}
    for split, count in ((DEV, num_dev), (HELD_OUT, num_held_out)):
        end = len(tasks) + count
        while len(tasks) < end:
            _, asked, rules = question(random, split)
            answer = msgspec.json.encode(rules).decode()
            message = Message(role="user", content=asked)
            task = Task(id=f"{split}-{len(tasks):03d}", messages=(message,), answer=answer, split=split)
            tasks.setdefault(asked, task)
    return write_rows(folder, tasks.values(), _answered(random))


def _answered(random: Random, num_train: int = 360, num_validation: int = 36) -> Iterator[Demonstration]:
    for number in range(num_train + num_validation):
        topic, asked, rules = question(random)
        yield Demonstration(
            id=f"answered-{number:04d}",
            messages=(Message(role="user", content=asked),),
            response=" ".join(_said(topic, random)[: random.randint(1, 3)]),
            answer=msgspec.json.encode(rules).decode(),
            split=VALIDATION if number >= num_train else TRAIN,
        )


def write_instructions(folder: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Write tasks.jsonl and experts.jsonl, as `headrace load` reads them."""
    return write_rows(folder, instructions(seed=seed), demonstrations(seed=seed))
