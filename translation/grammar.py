"""The default pairs: made-up English sentences, each with its Italian translation.

They are made up because no real sentences of good quality come with a package, and the first run
shall need no download. A sentence is built in both languages at once from tables of words and a
few rules: articles (il, lo, l', gli, un'), agreement in gender and number, plurals, verbs by
person in the present and the past (passato prossimo), can, must and want, negation, yes/no
questions, prepositions that contract (al, nello, dell'), possessives, and time phrases. Some
conventions leave one translation for each sentence: adjectives follow their noun; "you" is one
person; I, you and we are left out in Italian, and he, she and they are not; a profession has one
gender (la maestra, il medico); a sentence in the past says when.
"""

import random

from translation.words import (
    ACTIONS,
    ADJECTIVES,
    FEELINGS,
    GIFTS,
    HABITS,
    LOCATIONS,
    PEOPLE,
    POSSESSIVES,
    PRONOUNS,
    STATES,
    STAYS,
    TIMES,
    TO_PRONOUNS,
    WAYS,
    Phrase,
    Verb,
    add_s,
    agree,
    both,
    conjugate,
    contract,
    determiner,
    find_adjectives,
    find_nouns,
    join,
    parse_verb,
)

# Singular and plural; more often those that stand more often.
DETERMINERS = {
    "subject": ("the/the/the/this/that/a/every", "the/the/these/those/some/many/two/all the"),
    "known": ("the/the/this/that", "the/the/these/those"),
    "object": ("the/the/a/a/this/that", "the/the/these/those/some/many/two/all the"),
    "negated": ("the/the/a/this/that", "the/the/these/those"),
    "described": ("the/the/the/this/that", "the/the/the/these/those"),
    "new": ("a", "two/some/many"),
    "asked": ("a", "many"),
    "place": ("the/the/this", "the"),
    "owner": ("the/the/this", "the/these"),
}
BE = Verb("be", "", "essere", "")
HAVE = Verb("have", "", "avere", "")
LIKE = Verb("like", "", "piacere", "")
OWNED = ["animal", "text", "outfit", "object", "home", "kin"]  # of somebody, the girl's
HAD = ["acquaintance", "fruit", "furniture", "opening"]  # mine, yours, ours, as those are
VERY = "tall kind strong young rich big small old long interesting happy sad tired clean dirty"
NEVER = Phrase("never", "mai")
ADVERBS = [Phrase("often", "spesso"), Phrase("always", "sempre")]


def noun_phrase(noun, word="the", plural=False, adjective=None, owner=None) -> Phrase:
    """`word` is the determiner; with an owner it is the owner's: the girl's dog."""
    feminine = noun.gender[-1 if plural else 0] == "f"
    english = [noun.english_plural if plural else noun.english]
    italian = noun.italian_plural if plural else noun.italian
    article = determiner(word, plural, feminine, italian)
    if noun.kind == "kin" and word in POSSESSIVES and not plural:
        article = article.split()[1]  # mia madre, but la mia amica
    italian = join(article, italian)
    if adjective:
        english.insert(0, adjective.english)
        italian = join(italian, agree(adjective.italian, feminine, plural))
    if owner:
        word = owner.english + ("'" if owner.english.endswith("s") else "'s")
        italian = join(italian, contract("di", owner.italian))
    if word == "a" and english[0][0] in "aeiou":
        word = "an"
    person = "they" if plural else "she" if feminine else "he"
    return Phrase(" ".join([word, *english]).strip(), italian, person, feminine)


def clause(subject: Phrase, verb: Verb, tense="present", mood="statement", adverb=None) -> Phrase:
    """Subject and verb. The adverb stands before the English verb and after the Italian one."""
    adverb = adverb or Phrase("", "")
    if adverb == NEVER:
        mood = "statement"  # in English
    finite, rest = {
        "present": (verb.italian, ""),
        "past": ("avere", verb.participle),
        "can": ("potere", verb.italian),
        "must": ("dovere", verb.italian),
        "want": ("volere", verb.italian),
    }[tense]
    no = "non" if mood == "negative" or adverb == NEVER else ""
    finite = conjugate(finite, subject.person)
    italian = join(subject.italian, no, finite, adverb.italian, rest)
    base = "want to " + verb.english if tense == "want" else verb.english
    third = subject.person in ("he", "she")
    do = {"can": "can", "must": "must", "past": "did"}.get(tense, "does" if third else "do")
    if verb.english == "be":
        do, base = {"I": "am", "he": "is", "she": "is"}.get(subject.person, "are"), ""
    if mood == "question":
        english = [do.capitalize(), subject.english, adverb.english, base]
    elif mood == "negative":
        english = [subject.english, "cannot" if do == "can" else do + " not", base]
    elif tense in ("can", "must") or verb.english == "be":
        english = [subject.english, do, base]
    elif tense == "past":
        english = [subject.english, verb.past]
    else:
        head, *rest = base.split()
        english = [subject.english, adverb.english, add_s(head) if third else head, *rest]
    return Phrase(" ".join(filter(None, english)), italian)


def combine(*phrases: Phrase) -> Phrase:
    english = " ".join(phrase.english for phrase in phrases if phrase.english)
    return Phrase(english, join(*(phrase.italian for phrase in phrases)))


def after(preposition: str, phrase: Phrase) -> Phrase:
    english, italian, *_ = both(preposition)
    return Phrase(f"{english} {phrase.english}", contract(italian, phrase.italian))


class Author:
    """Makes up sentences. A mood is statement, negative or question."""

    def __init__(self, seed: int):
        # Of its methods, only random() is promised to be the same in each version of Python.
        self.random = random.Random(seed).random
        self.used = set()

    def pick(self, options):
        return options[int(self.random() * len(options))]

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def pair(self) -> tuple[str, str]:
        self.used = set()
        mood = self.pick(["statement", "statement", "statement", "negative", "question"])
        frames = [self.act] * 28 + [self.describe] * 5 + [self.like] * 3 + [self.be_somewhere] * 3
        frames += [self.there_is] * 2 + [self.feel] + [self.two_acts] * 3 + [self.act_because] * 2
        phrase = self.pick(frames)(mood)
        end = "?" if mood == "question" else "."
        english, italian = (text[0].upper() + text[1:] + end for text in phrase[:2])
        return english, italian

    def things(self, what: str, role: str, mood="negative") -> Phrase:
        """A noun phrase of these nouns. None comes twice in a sentence."""
        nouns = find_nouns(what)
        noun = self.pick([noun for noun in nouns if noun not in self.used] or nouns)
        self.used.add(noun)
        plural = noun.english_plural != "-" and self.chance(
            {"described": 0.5, "place": 0.2}.get(role, 0.35)
        )
        found = role in ("new", "asked")
        if not found and noun.kind in OWNED and self.chance(0.15):
            return noun_phrase(
                noun, plural=plural, owner=self.things("acquaintance stranger", "owner")
            )
        words = DETERMINERS[role][plural].split("/")
        if noun.kind in ("dish", "drink") and role != "described":
            words = ["the", "", "", "some", "some"] if mood == "statement" else ["the", "the", ""]
        if noun.kind == "kin":
            words = POSSESSIVES
        elif not found and noun.kind in OWNED + HAD:
            words = words + [self.pick(POSSESSIVES)]
        adjective = None
        if noun.kind != "kin" and role != "described" and self.chance(0.25):
            adjective = self.pick(find_adjectives(noun))
        return noun_phrase(noun, self.pick(words), plural, adjective)

    def subject(self, who: str, mood: str, pronouns=True) -> Phrase:
        if "kin" in who and pronouns and self.chance(0.6):
            asked = ["you"] * 3 + ["he", "she", "they"]  # who asks about himself is odd
            said = ["I", "you", "we"] * 2 + list(PRONOUNS)
            person = self.pick(asked if mood == "question" else said)
            return Phrase(person, PRONOUNS[person], person)
        return self.things(who, "subject" if mood == "statement" else "known")

    def object(self, what: str, mood: str, new=False) -> Phrase:
        if mood == "statement":
            return self.things(what, "new" if new else "object", mood)
        return self.things(what, "asked" if new else "negated", mood)

    def timed(self, phrase: Phrase, tense: str, mood: str) -> Phrase:
        """With a time phrase at its end or, where that is natural, at its beginning."""
        time = both(self.pick(TIMES[tense]))
        habit_denied = mood == "negative" and tense == "present"
        if mood == "question" or habit_denied or self.chance(0.6):
            return combine(phrase, time)
        return combine(time, phrase)

    def act(self, mood: str, tense=None, alone=True) -> Phrase:
        """Somebody does something, somewhere, some time."""
        tables = [ACTIONS, HABITS, GIFTS, GIFTS, STAYS, WAYS]
        table, row = self.pick([(table, row) for table in tables for row in table])
        who, entry, *where, what = row
        verb = parse_verb(entry)
        if tense is None:
            tense = self.pick(["present"] * 6 + ["past"] * 3 + ["can", "must", "want"])
        if mood == "question" and tense == "must" or verb.english == "lose" and tense != "present":
            tense = "past"
        if table is HABITS or table is WAYS and tense == "past":
            tense = "present"
        adverb = None
        if alone and tense == "present" and table is not HABITS and self.chance(0.25):
            adverb = NEVER if mood == "negative" else self.pick(ADVERBS)
        phrase = clause(self.subject(who, mood, pronouns=alone), verb, tense, mood, adverb)
        if where:
            phrase = combine(phrase, after(where[0], self.things(what, "place")))
        else:
            # Nobody eats this apple every day, nor writes my letter.
            often = tense == "present" and verb.english in ("eat", "buy", "give")
            new = often or verb.english == "write"
            phrase = combine(phrase, self.object(what, mood, new))
        if table is GIFTS:
            role = "subject" if mood == "statement" else "known"
            phrase = combine(phrase, after("to = a", self.things(PEOPLE, role)))
        sometimes = adverb is None and table is not HABITS and self.chance(0.5)
        if alone and (sometimes or tense == "past"):
            phrase = self.timed(phrase, tense, mood)
        return phrase

    def two_acts(self, mood: str) -> Phrase:
        """By two who are named; a question is of one act."""
        if mood == "question":
            return self.act(mood)
        word = "but = ma" if mood == "negative" else self.pick(["and = e", "while = mentre"])
        first = self.act("statement", "present", alone=False)
        return combine(first, both(word), self.act(mood, "present", alone=False))

    def feeling(self, subject: Phrase, entry: str, mood: str) -> Phrase:
        english, italian, *_ = both(entry)
        to_be = clause(subject, BE, mood=mood).english
        to_have = clause(subject, HAVE, mood=mood).italian
        return Phrase(f"{to_be} {english}", f"{to_have} {italian}")

    def feel(self, mood: str) -> Phrase:
        subject = self.subject(PEOPLE, mood)
        phrase = self.feeling(subject, self.pick(list(FEELINGS)), mood)
        return combine(phrase, both("today = oggi")) if self.chance(0.4) else phrase

    def act_because(self, mood: str) -> Phrase:
        feeling, (entry, what) = self.pick(list(FEELINGS.items()))
        subject = self.subject(PEOPLE, mood)
        phrase = clause(subject, parse_verb(entry), self.pick(["present", "want"]), mood)
        phrase = combine(phrase, self.object(what, "negative"))
        if mood != "statement":
            return phrase
        pronoun = Phrase(subject.person, "", subject.person)
        return combine(phrase, both("because = perché"), self.feeling(pronoun, feeling, mood))

    def describe(self, mood: str) -> Phrase:
        entry, what = self.pick([*ADJECTIVES.items(), *STATES.items(), *STATES.items()])
        english, italian, *_ = both(entry)
        subject = self.things(what, "described")
        if PEOPLE in what and self.chance(0.3):
            # Of "I am tired" nobody knows whether it is stanco or stanca.
            person = self.pick(list(PRONOUNS) if italian.endswith("e") else ["he", "she"])
            subject = Phrase(person, PRONOUNS[person], person, person == "she")
        italian = agree(italian, subject.feminine, subject.person in ("we", "they"))
        phrase = Phrase(english, italian)
        if english in VERY.split() and self.chance(0.3):
            phrase = combine(both("very = molto"), phrase)
        phrase = combine(clause(subject, BE, mood=mood), phrase)
        if entry in STATES and self.chance(0.3):
            phrase = combine(phrase, both("today = oggi"))
        return phrase

    def like(self, mood: str) -> Phrase:
        """Who likes it in English is to whom it is pleasing in Italian."""
        subject = self.subject(PEOPLE, mood)
        noun = self.pick(find_nouns("animal fruit dish drink text outfit sight"))
        plural = noun.english_plural != "-" and self.chance(0.7)
        adjective = self.pick(find_adjectives(noun)) if self.chance(0.3) else None
        if noun.english_plural == "-" or plural and self.chance(0.6):  # fish, apples: all there is
            liked = noun_phrase(noun, "", plural, adjective).english
            pleasing = noun_phrase(noun, "the", plural, adjective).italian
        else:
            word = self.pick(["these", "those"] if plural else ["this", "that"])
            liked, pleasing, *_ = noun_phrase(noun, word, plural, adjective)
        no = "non" if mood == "negative" else ""
        words = [no, conjugate("piacere", "they" if plural else "he"), pleasing]
        if subject.english not in TO_PRONOUNS:
            words.insert(0, contract("a", subject.italian))
        else:
            words.insert(0 if subject.english == "they" else 1, TO_PRONOUNS[subject.english])
        return Phrase(f"{clause(subject, LIKE, mood=mood).english} {liked}", join(*words))

    def be_somewhere(self, mood: str) -> Phrase:
        who, preposition, where = self.pick(LOCATIONS)
        subject = self.subject(who, mood if mood == "question" else "negative")
        place = after(preposition, self.things(where, "place"))
        return combine(clause(subject, BE, mood=mood), place)

    def there_is(self, mood: str) -> Phrase:
        who, preposition, where = self.pick(LOCATIONS)
        what = self.things(who.replace("kin", ""), "asked" if mood == "question" else "new")
        many = what.person == "they"
        english = ["there", "are" if many else "is"]
        if mood == "question":
            english.reverse()
        there = Phrase(" ".join(english), "ci sono" if many else "c'è")
        return combine(there, what, after(preposition, self.things(where, "place")))


def default_pairs() -> list[tuple[str, str]]:
    """12,000 distinct pairs of an English sentence and its Italian translation, always the same."""
    author = Author(seed=8)  # with it even the rarest forms come in ten sentences
    pairs = {}
    while len(pairs) < 12_000:
        english, italian = author.pair()
        if max(len(english.split()), len(italian.split())) <= 14:
            pairs[english] = italian
    return list(pairs.items())
