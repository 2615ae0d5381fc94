"""Nouns, adjectives and small words, German and English, one to one within and over categories.

Classes say what a word goes with: p person, a animal, t thing, l place. No form of an entry is a
form of another one, and every noun tells its number wherever it can stand, so that a sentence in
either language has exactly one reading.
"""

import dataclasses

# German singular, gender, plural; English singular, plural; `*`: weak, other cases as the plural.
_NOUNS = {
  "p": """
    Mann m Männer man men; Frau f Frauen woman women; Kind n Kinder child children
    Junge* m Jungen boy boys; Mädchen n Mädchen girl girls; Lehrer m Lehrer teacher teachers
    Arzt m Ärzte doctor doctors; Bauer* m Bauern farmer farmers; König m Könige king kings
    Königin f Königinnen queen queens; Prinzessin f Prinzessinnen princess princesses
    Student* m Studenten student students; Soldat* m Soldaten soldier soldiers
    Koch m Köche chef chefs; Bäcker m Bäcker baker bakers; Richter m Richter judge judges
    Dieb m Diebe thief thieves; Sänger m Sänger singer singers; Gast m Gäste guest guests
    Tänzerin f Tänzerinnen dancer dancers; Nachbar* m Nachbarn neighbour neighbours
    Freund m Freunde friend friends; Onkel m Onkel uncle uncles; Tante f Tanten aunt aunts
    Mutter f Mütter mother mothers; Vater m Väter father fathers; Bruder m Brüder brother brothers
    Schwester f Schwestern sister sisters; Sohn m Söhne son sons
    Tochter f Töchter daughter daughters; Ritter m Ritter knight knights; Hexe f Hexen witch witches
    Pilot* m Piloten pilot pilots; Riese* m Riesen giant giants; Jäger m Jäger hunter hunters
    Fischer m Fischer fisherman fishermen; Dichter m Dichter poet poets
    Gärtner m Gärtner gardener gardeners""",
  "a": """
    Hund m Hunde dog dogs; Katze f Katzen cat cats; Pferd n Pferde horse horses
    Kuh f Kühe cow cows; Vogel m Vögel bird birds; Maus f Mäuse mouse mice
    Bär* m Bären bear bears; Wolf m Wölfe wolf wolves; Fuchs m Füchse fox foxes
    Ente f Enten duck ducks; Gans f Gänse goose geese; Huhn n Hühner chicken chickens
    Ziege f Ziegen goat goats; Esel m Esel donkey donkeys; Löwe* m Löwen lion lions
    Affe* m Affen monkey monkeys; Frosch m Frösche frog frogs; Schlange f Schlangen snake snakes
    Spinne f Spinnen spider spiders; Elefant* m Elefanten elephant elephants""",
  "t": """
    Ball m Bälle ball balls; Buch n Bücher book books; Brief m Briefe letter letters
    Tisch m Tische table tables; Stuhl m Stühle chair chairs; Schlüssel m Schlüssel key keys
    Apfel m Äpfel apple apples; Brot n Brote loaf loaves; Kleid n Kleider dress dresses
    Hut m Hüte hat hats; Schuh m Schuhe shoe shoes; Mantel m Mäntel coat coats
    Tasse f Tassen cup cups; Flasche f Flaschen bottle bottles; Lampe f Lampen lamp lamps
    Uhr f Uhren clock clocks; Bild n Bilder picture pictures; Karte f Karten card cards
    Koffer m Koffer suitcase suitcases; Messer n Messer knife knives; Löffel m Löffel spoon spoons
    Teller m Teller plate plates; Blume f Blumen flower flowers; Stein m Steine stone stones
    Auto n Autos car cars; Fahrrad n Fahrräder bicycle bicycles; Korb m Körbe basket baskets
    Kiste f Kisten box boxes; Ring m Ringe ring rings; Geschenk n Geschenke gift gifts
    Zeitung f Zeitungen newspaper newspapers; Spiegel m Spiegel mirror mirrors
    Decke f Decken blanket blankets; Tasche f Taschen bag bags; Stift m Stifte pen pens""",
  "l": """
    Haus n Häuser house houses; Garten m Gärten garden gardens; Wald m Wälder forest forests
    Stadt f Städte city cities; Dorf n Dörfer village villages; Kirche f Kirchen church churches
    Schule f Schulen school schools; Küche f Küchen kitchen kitchens; Zimmer n Zimmer room rooms
    Park m Parks park parks; Turm m Türme tower towers; Schloss n Schlösser castle castles
    Laden m Läden shop shops; Hotel n Hotels hotel hotels; Museum n Museen museum museums
    Fabrik f Fabriken factory factories; Höhle f Höhlen cave caves; Keller m Keller cellar cellars
    Bahnhof m Bahnhöfe station stations; Krankenhaus n Krankenhäuser hospital hospitals""",
}

_NAMES = "Anna Peter Maria Paul Clara Thomas Emma Felix Julia David Laura Martin Sophie Simon"

_ADJECTIVES = {
  "patl": "groß big, klein small, alt old, schön beautiful, seltsam strange, hässlich ugly",
  "pa": """müde tired, hungrig hungry, traurig sad, glücklich happy, böse evil, klug clever,
    dumm stupid, mutig brave, faul lazy, stark strong, jung young, krank sick, freundlich friendly,
    stolz proud, einsam lonely, schwach weak, dünn thin, dick fat, wild wild, blind blind""",
  "p": """arm poor, reich rich, berühmt famous, ehrlich honest, höflich polite, fleißig diligent,
    nervös nervous""",
  "tl": "neu new, schmutzig dirty, leer empty, modern modern, warm warm, kalt cold, hell bright",
  "t": """rot red, grün green, blau blue, gelb yellow, schwer heavy, wertvoll valuable, rund round,
    billig cheap, nass wet, trocken dry, kaputt broken, hölzern wooden""",
  "at": "weiß white, schwarz black, braun brown",
}


@dataclasses.dataclass(frozen=True)
class Noun:
  """A noun; `oblique` is its singular outside the nominative, where plural datives get `n`."""

  singular: str
  plural: str
  oblique: str
  gender: str
  english: tuple[str, str]
  kind: str

  @property
  def dative_plural(self) -> str:
    """The plural after `mit`: with `n` unless it ends in `n` or `s`."""
    return self.plural if self.plural[-1] in "ns" else self.plural + "n"


@dataclasses.dataclass(frozen=True)
class Adjective:
  """An adjective and the classes of nouns it goes with."""

  german: str
  english: str
  kinds: str


def _nouns() -> list[Noun]:
  nouns = []
  for kind, table in _NOUNS.items():
    for entry in table.replace("\n", ";").split(";"):
      if entry.split():
        singular, gender, plural, *english = entry.split()
        oblique = plural if singular.endswith("*") else singular
        singular = singular.rstrip("*")
        nouns.append(Noun(singular, plural, oblique, gender, (english[0], english[1]), kind))
  return nouns


def _adjectives() -> list[Adjective]:
  entries = [
    (*entry.split(), kinds) for kinds, table in _ADJECTIVES.items() for entry in table.split(",")
  ]
  return [Adjective(german, english, kinds) for german, english, kinds in entries]


NOUNS: tuple[Noun, ...] = tuple(_nouns())
NAMES: tuple[str, ...] = tuple(_NAMES.split())
ADJECTIVES: tuple[Adjective, ...] = tuple(_adjectives())
# Before the English verb; in German before objects that are no pronouns. The first six say how
# often, and go with `ist müde` too.
ADVERBS: tuple[tuple[str, str], ...] = (
  ("oft", "often"),
  ("immer", "always"),
  ("nie", "never"),
  ("selten", "rarely"),
  ("manchmal", "sometimes"),
  ("meistens", "usually"),
  ("heimlich", "secretly"),
  ("plötzlich", "suddenly"),
  ("langsam", "slowly"),
  ("vorsichtig", "carefully"),
  ("leise", "quietly"),
  ("gerne", "gladly"),
  ("bald", "soon"),
  ("endlich", "finally"),
  ("sofort", "immediately"),
  ("zufällig", "accidentally"),
)
NUMERALS = (("zwei", "two"), ("drei", "three"), ("vier", "four"), ("fünf", "five"))
CONJUNCTIONS = (
  ("weil", "because"),
  ("obwohl", "although"),
  ("während", "while"),
  ("bevor", "before"),
  ("bis", "until"),
  ("wenn", "if"),
)
COORDINATIONS = (("und", "and"), ("aber", "but"), ("oder", "or"))

# Words with their tags, in German and English; `when` says which tenses they go with.
TIMES: tuple[tuple[str, str, str], ...] = (
  ("heute/adv", "today/adv", "any"),
  ("jetzt/adv", "now/adv", "present"),
  ("am/prep Abend/noun", "in/prep the/det evening/noun", "any"),
  ("am/prep Morgen/noun", "in/prep the/det morning/noun", "any"),
  ("in/prep der/det Nacht/noun", "at/prep night/noun", "any"),
  ("jeden/det Tag/noun", "every/det day/noun", "any"),
  ("jede/det Woche/noun", "every/det week/noun", "any"),
  ("im/prep Sommer/noun", "in/prep summer/noun", "any"),
  ("am/prep Sonntag/noun", "on/prep Sunday/name", "any"),
  ("gestern/adv", "yesterday/adv", "past"),
  ("letzte/adj Woche/noun", "last/adj week/noun", "past"),
  ("morgen/adv", "tomorrow/adv", "future"),
  ("nächste/adj Woche/noun", "next/adj week/noun", "future"),
)
# Prepositions: German, case, English, classes of what follows.
NOUN_PREPOSITIONS = (
  ("mit", "dat", "with", "at"),
  ("ohne", "acc", "without", "at"),
  ("neben", "dat", "next to", "patl"),
  ("hinter", "dat", "behind", "patl"),
  ("aus", "dat", "from", "l"),
)
PLACE_PREPOSITIONS = (("in", "dat", "in", "l"), ("vor", "dat", "in front of", "l"))
BENEFIT_PREPOSITION = ("für", "acc", "for", "p")
MOTION_PREPOSITIONS = (
  ("in", "acc", "into", "l"),
  ("zu", "dat", "to", "pl"),
  ("durch", "acc", "through", "l"),
)
CONTRACTIONS = {
  ("in", "dem"): "im",
  ("in", "das"): "ins",
  ("zu", "dem"): "zum",
  ("zu", "der"): "zur",
}
