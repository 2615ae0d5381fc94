"""Verbs, German and English, with their principal parts and what they go with.

Classes as in the lexicon: p person, a animal, t thing, l place. English verbs whose past is their
base are left out, so that every form tells its tense.
"""

import dataclasses

# Infinitive, third person present, past, participle (weak ones left out; `|` before a particle,
# `+`: perfect with `sein`); English base, past, participle; classes of subject, of object.
_VERBS = {
  "transitive": """
    sehen sieht sah gesehen; see saw seen; pa patl
    hören; hear heard heard; pa pa
    finden findet fand gefunden; find found found; p patl
    lieben; love loved loved; pa pa
    suchen; seek sought sought; pa patl
    fragen; ask asked asked; p p
    besuchen - - besucht; visit visited visited; p pl
    rufen ruft rief gerufen; call called called; p pa
    fangen fängt fing gefangen; catch caught caught; pa pat
    tragen trägt trug getragen; carry carried carried; pa pat
    waschen wäscht wusch gewaschen; wash washed washed; p pat
    malen; paint painted painted; p patl
    kaufen; buy bought bought; p atl
    verkaufen - - verkauft; sell sold sold; p atl
    reparieren - - repariert; repair repaired repaired; p t
    verlieren verliert verlor verloren; lose lost lost; p t
    verstecken - - versteckt; hide hid hidden; pa pat
    vergessen vergisst vergaß vergessen; forget forgot forgotten; p patl
    kennen kennt kannte gekannt; know knew known; pa pal
    treffen trifft traf getroffen; meet met met; p p
    küssen küsst küsste geküsst; kiss kissed kissed; p pa
    jagen; chase chased chased; pa a
    beißen beißt biss gebissen; bite bit bitten; a pat
    füttern; feed fed fed; p a
    retten; rescue rescued rescued; pa pa
    loben; praise praised praised; p p
    bewundern - - bewundert; admire admired admired; p pal
    beobachten - - beobachtet; observe observed observed; pa patl
    brauchen; need needed needed; p pat
    stehlen stiehlt stahl gestohlen; steal stole stolen; pa at
    werfen wirft warf geworfen; throw threw thrown; p t
    wecken; wake woke woken; pa pa
    trösten; comfort comforted comforted; p p
    fürchten; fear feared feared; pa pa
    verlassen verlässt verließ verlassen; leave left left; p pl
    verstehen versteht verstand verstanden; understand understood understood; p p
    entdecken - - entdeckt; discover discovered discovered; p patl
    beschreiben beschreibt beschrieb beschrieben; describe described described; p patl
    zurück|lassen lässt ließ gelassen; abandon abandoned abandoned; p pat
    an|rufen ruft rief gerufen; phone phoned phoned; p p
    ab|holen; collect collected collected; p pat
    ein|laden lädt lud geladen; invite invited invited; p p
    vor|stellen; introduce introduced introduced; p p
    mit|nehmen nimmt nahm genommen; take took taken; p pat
    mit|bringen bringt brachte gebracht; bring brought brought; pa pat
    weg|werfen wirft warf geworfen; discard discarded discarded; p t
    auf|heben hebt hob gehoben; lift lifted lifted; p at
    an|sehen sieht sah gesehen; watch watched watched; pa patl
    aus|suchen; pick picked picked; p at
    ein|packen; pack packed packed; p t
    aus|leihen leiht lieh geliehen; borrow borrowed borrowed; p t
    aus|lachen; mock mocked mocked; p p
    fest|halten hält hielt gehalten; hold held held; pa pat""",
  "intransitive": """
    schlafen schläft schlief geschlafen; sleep slept slept; pa
    lachen; laugh laughed laughed; p
    weinen; cry cried cried; p
    singen singt sang gesungen; sing sang sung; p
    tanzen tanzt tanzte getanzt; dance danced danced; pa
    arbeiten; work worked worked; p
    spielen; play played played; pa
    warten; wait waited waited; pa
    lügen lügt log gelogen; lie lied lied; p
    zittern; tremble trembled trembled; pa
    träumen; dream dreamed dreamed; p
    sterben+ stirbt starb gestorben; die died died; pa
    auf|stehen+ steht stand gestanden; rise rose risen; pa
    an|fangen fängt fing gefangen; begin began begun; p
    auf|hören; stop stopped stopped; p""",
  "motion": """
    gehen+ geht ging gegangen; go went gone; pa
    laufen+ läuft lief gelaufen; run ran run; pa
    reisen+ reist reiste gereist; travel travelled travelled; p
    fliehen+ flieht floh geflohen; flee fled fled; pa
    fahren+ fährt fuhr gefahren; drive drove driven; p
    springen+ springt sprang gesprungen; jump jumped jumped; pa
    kriechen+ kriecht kroch gekrochen; crawl crawled crawled; pa
    zurück|kommen+ kommt kam gekommen; return returned returned; pa""",
  "dative": """
    helfen hilft half geholfen; help helped helped; pa pa
    danken; thank thanked thanked; p p
    folgen+; follow followed followed; pa pa
    antworten; answer answered answered; p p
    vertrauen - - vertraut; trust trusted trusted; pa p
    gehorchen - - gehorcht; obey obeyed obeyed; pa p
    dienen; serve served served; p p
    drohen; threaten threatened threatened; p pa
    begegnen+ - - begegnet; encounter encountered encountered; pa pa
    widersprechen widerspricht widersprach widersprochen; contradict contradicted contradicted; p p
    zu|hören; heed heeded heeded; p p
    bei|stehen steht stand gestanden; support supported supported; p p""",
  "ditransitive": """
    geben gibt gab gegeben; give gave given; p t
    zeigen; show showed shown; p tl
    schicken; send sent sent; p t
    leihen leiht lieh geliehen; lend lent lent; p t
    erklären - - erklärt; explain explained explained; p t
    empfehlen empfiehlt empfahl empfohlen; recommend recommended recommended; p tl
    an|bieten bietet bot geboten; offer offered offered; p t""",
  "complement": """
    sagen; say said said; p
    glauben; believe believed believed; p
    hoffen; hope hoped hoped; p
    denken denkt dachte gedacht; think thought thought; p
    behaupten - - behauptet; claim claimed claimed; p
    bemerken - - bemerkt; notice noticed noticed; pa
    vermuten - - vermutet; suspect suspected suspected; p
    schwören schwört schwor geschworen; swear swore sworn; p
    beweisen beweist bewies bewiesen; prove proved proved; p
    zu|geben gibt gab gegeben; admit admitted admitted; p""",
}


@dataclasses.dataclass(frozen=True)
class Verb:
  """A verb: principal parts without the particle, and the classes of its subject and object."""

  infinitive: str
  present: str
  past: str
  participle: str
  particle: str
  moves: bool
  english: tuple[str, str, str]
  frame: str
  subjects: str
  objects: str

  @property
  def stem(self) -> str:
    """The infinitive without its ending."""
    return _stem(self.infinitive)


def _stem(infinitive: str) -> str:
  return infinitive[:-1] if infinitive.endswith("ern") else infinitive[:-2]


def _verb(entry: str, frame: str) -> Verb:
  german, english, classes = (part.split() for part in entry.split(";"))
  whole, present, past, participle = (*german, "-", "-", "-")[:4]
  particle, _, infinitive = whole.rstrip("+").rpartition("|")
  stem = _stem(infinitive)
  link = "e" if stem[-1] in "dt" or stem.endswith("gn") else ""
  weak = f"{stem}{link}t"
  return Verb(
    infinitive=infinitive,
    present=weak if present == "-" else present,
    past=f"{weak}e" if past == "-" else past,
    participle=f"{particle}ge{weak}" if participle == "-" else particle + participle,
    particle=particle,
    moves=whole.endswith("+"),
    english=(english[0], english[1], english[2]),
    frame=frame,
    subjects=classes[0],
    objects=classes[1] if len(classes) > 1 else "",
  )


VERBS: tuple[Verb, ...] = tuple(
  _verb(entry, frame)
  for frame, table in _VERBS.items()
  for entry in table.splitlines()
  if entry.strip()
)
