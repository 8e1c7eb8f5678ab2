"""Patterns of facts: what numbers, dates, names, prohibitions and decisions look like, by language."""

# ruff: noqa: E501
# fmt: off

import re
from dataclasses import dataclass
from typing import Literal

FactKind = Literal[
    "prohibition", "decision", "identifier", "address", "date", "time", "price", "number", "name", "quote", "negation"
]


@dataclass(frozen=True, slots=True)
class Rule:
    kind: FactKind
    pattern: re.Pattern[str]
    needs: frozenset[str]
    """Beginnings of words one of which a match holds (``0`` for a digit, ``漢`` for a dense script); none: anything."""


_MONTHS = "jan feb mar mär apr may mai jun jul aug sep okt oct nov dec dez ene abr ago dic fév avr jui aoû déc янв фев апр мая май мае июн июл авг сен окт ноя дек"
_DAYS = "mon tue wed thu fri sat sun die mit don fre sam son lun mar mié jue vie sáb dom mer jeu ven dim пон вто сре чет пят суб вос"
_COUNTS = "two thr fou fiv six sev eig nin ten ele twe fif for hun tho doz hal one zwe dre vie fün sec sie ach neu zeh elf zwö dos tre cua cin sei sie och nue die onc doc два две дву три трё чет пят шес сем вос дев дес две"
WORD_STARTS = re.compile(r"\w+")


DENSE = "\u0e00-\u0e7f\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_MONTH = (
    r"(?:jan(?:uary|uar)?|feb(?:ruary|ruar)?|mar(?:ch)?|märz|apr(?:il)?|may|mai|june?|juni|july?|juli|aug(?:ust)?"
    r"|sept?(?:ember)?|o[ck]t(?:ober)?|nov(?:ember)?|de[cz](?:ember)?"
    r"|enero|febrero|marzo|abril|mayo|junio|julio|agosto|septiembre|octubre|noviembre|diciembre"
    r"|janvier|février|mars|avril|juin|juillet|août|septembre|octobre|novembre|décembre"
    r"|январ[ьяе]|феврал[ьяе]|март[ае]?|апрел[ьяе]|ма[йяе]|июн[ьяе]|июл[ьяе]|август[ае]?|сентябр[ьяе]|октябр[ьяе]"
    r"|ноябр[ьяе]|декабр[ьяе])"
)
_DAY = (
    r"(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day|montag|dienstag|mittwoch|donnerstag|freitag|samstag|sonnabend|sonntag"
    r"|lunes|martes|miércoles|jueves|viernes|sábado|domingo|lundi|mardi|mercredi|jeudi|vendredi|samedi|dimanche"
    r"|понедельник[ау]?|вторник[ау]?|сред[ауы]|четверг[ау]?|пятниц[ауы]|суббот[ауы]|воскресень[ея])"
)
_COUNT = (
    r"(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|twenty|thirty|forty|fifty|hundred|thousand"
    r"|dozen|half|zwei|drei|vier|fünf|sechs|sieben|acht|neun|zehn|elf|zwölf|dos|tres|cuatro|cinco|seis|siete|ocho|nueve"
    r"|diez|once|doce|два|две|двух|три|трёх|четыре|пять|шесть|семь|восемь|девять|десять|двенадцать)"
)
_ORDINAL = r"(?:\d{1,2}(?:st|nd|rd|th)|first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth)"
_FIGURE = r"[-+−]?\d+(?:[.,:'’/×x-]\d+){0,8}"
_PERIOD = r"(?:\s+(?:in the (?:early )?(?:morning|afternoon|evening)|at (?:night|noon)|tonight|sharp))?"
_CJK_NUMERAL = "〇零一二三四五六七八九十百千万萬亿億两兩"
_CJK_UNIT = (
    r"(?:年|月|日|号|號|時|时|点|點|分|秒|元|円|块|塊|人|名|位|个|個|件|台|张|枚|杯|套|册|冊|晚|泊|室|本|歳|岁|歲|公里|米|公斤|克|度|次|回|天|周|週|间|間|层|層|楼"
    r"|階|页|頁|章|条|項|项|号线|%|％)"
)

_TABLE: tuple[tuple[FactKind, str, str], ...] = (
        ("address", r"https?://[^\s<>\"'）)]+[^\s<>\"'）).,;:!?]|(?<![\w.+-])[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+", ""),
        ("address", r"(?<![\w/.@-])(?:~|\.{1,2})?/?(?:[\w.@-]{1,80}/){1,20}[\w.@-]{0,80}\w", ""),
        ("address", r"(?<![\w.-])\d{1,6}[\w-]{0,8}(?: [^\W\d_][\w'’.-]*){1,4}? (?:street|st|avenue|ave|road|rd|lane|drive|boulevard|blvd"
                    r"|way|place|square|court|terrace|gardens|highway|straße|platz|weg|allee)\b", "0"),
        ("time", rf"\b(?:\d{{1,2}}|{_COUNT}|one) (?:in the (?:early )?(?:morning|afternoon|evening)|at (?:night|noon))\b", "0 one " + _COUNTS),
        ("time", rf"(?:half|quarter|\d{{1,2}}|{_COUNT}) (?:past|to|before|after) (?:\d{{1,2}}|{_COUNT}){_PERIOD}\b", "0 hal qua " + _COUNTS),
        ("time", rf"(?:(?:morning|afternoon|evening) )?\b(?:\d{{1,2}}(?:[:.]\d\d)?|{_COUNT})(?:[- ](?:thirty|fifteen))?"
                 rf"\s?(?:[ap]\.?m\b\.?|o.?clock\b|uhr\b|часов|часа\b){_PERIOD}", "0 " + _COUNTS),
        ("time", rf"(?:(?:morning|afternoon|evening) )?(?<![\d:])\d{{1,2}}:\d\d(?::\d\d)?(?!\d){_PERIOD}", "0"),
        ("time", r"\b(?:noon|midnight|mittag|mitternacht|mediodía|medianoche|полдень|полночь)\b|中午|正午|午夜|真夜中", "noo mid mit med пол 漢"),
        ("date", r"(?<!\d)\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[T ]\d\d:\d\d(?::\d\d)?)?(?!\d)"
                 r"|(?<![\d.])\d{1,2}[./]\d{1,2}[./]\d{2,4}(?!\d)", "0"),
        ("date", rf"(?:{_DAY},? )?\b{_MONTH}\.?,? (?:the )?(?:\d{{1,2}}(?:st|nd|rd|th)?|{_ORDINAL})\b(?:,? \d{{4}})?", _MONTHS),
        ("date", rf"(?:{_DAY},? )?(?:the )?(?<![\d.,:])(?:{_ORDINAL}|\d{{1,2}}\.?)(?: of| de)? "
                 rf"(?:{_MONTH}\b|(?:this|next|the) month\b|dieses monats|de este mes|этого месяца)"
                 rf"(?:,?(?: de)? \d{{4}}(?: г(?:ода|\.))?)?", "0 fir sec thi fou fif six sev eig nin ten"),
        ("date", rf"\b{_MONTH}(?: de)? \d{{4}}(?!\d)", "0"),
        ("date", r"\bthe \d{1,2}(?:st|nd|rd|th)\b", "0"),
        ("time", rf"\b(?:at least |about |only |usually )?(?:once|twice|(?:(?:a )?(?:few|couple of)|several|many|{_COUNT}|\d+) times)"
                 r"(?: or (?:twice|so|\w+ times))? (?:a|an|per|every|each) (?:day|night|week|month|year)\b"
                 r"|\bevery (?:other )?(?:day|morning|evening|night|week|month|year)\b", "onc twi tim eve"),
        ("time", rf"\b(?:(?:about|over|almost) )?(?:a (?:few|couple of)|an?|several|many|{_COUNT}|\d+)(?: more)? "
                 r"(?:years?|months?|weeks?|days?|hours?|minutes?) (?:ago|later|earlier|before|old|from now)\b", "yea mon wee day hou min"),
        ("date", rf"\b(?:(?:this|next|last|on|every|coming|nächste[nr]?|letzte[nr]?|am|kommenden|el|próximo|pasado|в|во"
                 rf"|следующ\w+|прошл\w+) )?{_DAY}(?: (?:next|this) week| que viene)?\b", _DAYS),
        ("date", r"\b(?:day after tomorrow|later today|tomorrow|yesterday|today|tonight|(?:this|next|last) (?:week(?:end)?|month|year"
                 r"|summer|winter|spring|autumn|fall)|übermorgen|heute|gestern|nächste (?:woche)|nächsten monat|mañana"
                 r"|ayer|hoy|pasado mañana|la (?:próxima )?semana(?: que viene)?|demain|hier|aujourd'hui|завтра|вчера"
                 r"|сегодня|послезавтра|на следующей неделе)\b", "day lat tom yes tod ton thi nex las übe heu ges näc mañ aye hoy pas la dem hie auj зав вче сег пос на"),
        ("date", rf"(?:[\d{_CJK_NUMERAL}]{{1,6}}年)?(?:[\d{_CJK_NUMERAL}]{{1,3}}月)(?:[\d{_CJK_NUMERAL}]{{1,3}}[日号號])?"
                 rf"|[\d{_CJK_NUMERAL}]{{2,6}}年|[\d{_CJK_NUMERAL}]{{1,3}}[日号號](?!线)"
                 r"|(?:下|上|这|這|本|来|來|先|今)?(?:周|週|星期|礼拜|禮拜)[一二三四五六日天末]|[月火水木金土日]曜日?"
                 r"|今天|明天|昨天|后天|後天|前天|今日|明日|昨日|明後日|来週|先週|今週|下周|下週|上周|上週|下个月|来月|先月|明年"
                 r"|去年|来年", "漢"),
        ("time", rf"(?:上午|下午|早上|晚上|凌晨|午前|午後|夜)?[\d{_CJK_NUMERAL}]{{1,3}}[点點時时](?:半|[\d{_CJK_NUMERAL}]{{1,3}}分)?", "漢"),
        ("time", r"(?:halb|viertel (?:nach|vor|acht)) \w+|\ba las? \w+(?: y (?:media|cuarto|\w+)| menos cuarto)|в половине \w+|\bполов\w+ \w+ого\b", "hal vie las la пол"),
        ("date", r"(?:\d{2,4}년\s?)?\d{1,2}월(?:\s?\d{1,2}일)?(?:\s?\(?[월화수목금토일](?:요일\)?|\)))?|\d{4}년|[월화수목금토일]요일"
                 r"|오늘|내일|모레|어제|(?:이번|다음|지난)\s?(?:주|달|해)|내년|작년", "漢"),
        ("time", r"(?:(?:오전|오후|아침|저녁|밤|새벽)\s?)?(?<!\d)\d{1,2}(?:시(?!간)(?:\s?\d{1,2}분|\s?반)?|:\d\d)|정오|자정", "漢"),
        ("price", r"(?:\d[\d,.]*\s?(?:억|만|천)?|[일이삼사오육칠팔구십백천만]{2,})\s?(?:원|달러|유로|엔)", "漢"),
        ("number", r"(?:\d[\d,.]*|(?<!\w)(?:한|두|세|네|다섯|여섯|일곱|여덟|아홉|열))\s?(?:명|개월|개|대|잔|권|장|마리|박|층|호실|호|번|시간|분|일|주|년|살|세|인분|퍼센트)", "漢"),
        ("name", r"[가-힣]{2,4}(?=\s?(?:씨|님|선생님|과장|부장|대리|사장))|[가-힣]{1,8}(?:역|공항|호텔|대학교|병원)(?=[에은는이가을를의,.\s]|$)", "漢"),
        ("name", r"[\u4e00-\u9fff]{1,4}(?:さん|様|氏|部長|課長|社長)|[\u4e00-\u9fff]{1,3}(?:先生|女士|小姐|经理|老师)"
                 r"|(?<=我叫)[\u4e00-\u9fff]{2,4}|(?<=联系人)[是：:]?[\u4e00-\u9fff]{2,4}", "漢"),
        ("price", rf"(?:[$€£¥₽₹￥]|\b(?:USD|EUR|GBP|CHF|RMB|US\$)) ?{_FIGURE}(?: ?(?:k|m|million|billion|Mio)\b)?"
                  r"(?: (?:per|a|an|each|pro|al|por|в) \w+)?", "0"),
        ("price", rf"{_FIGURE}(?: (?:million|thousand|millionen|тыс\.?|млн))? ?(?:[$€£¥₽₹￥]|(?:dollars?|euros?|pounds?|yen"
                  rf"|francs?|franken|pesos|rubel|рубл\w+|долл\w+|евро|bucks|USD|EUR|GBP|CHF|RMB)\b|元|円|欧元|美元|万円|万元)"
                  r"(?: (?:per|a|an|each|pro|al|por|в) \w+)?", "0"),
        ("number", r"\+?\(?\d{2,4}\)?(?:[ -]\d{2,5}){1,5}(?!\d)", "0"),
        ("number", rf"(?<![\d{_CJK_NUMERAL}])[\d{_CJK_NUMERAL}]{{1,15}}(?:[.,]\d+)?(?:多|余|餘)?{_CJK_UNIT}", "漢"),
        ("number", rf"(?<![\w.]){_FIGURE}%?(?: ?(?!\b(?:and|or|at|on|in|to|of|for|the|is|are|und|oder|y|o|и)\b)"
                   rf"(?![{DENSE}가-힣])[^\W\d_]+)?", "0"),
        ("number", rf"\b{_COUNT} (?!(?:of|and|or|to|in|the|is)\b)[^\W\d_]+", _COUNTS),
        ("number", r"\d+(?:[.,]\d+)*", "0"),
        ("identifier", rf"(?<![\w-])(?=[^\s{DENSE}]*\d)(?=[^\s{DENSE}가-힣]*(?![{DENSE}가-힣])[^\W\d_])(?:(?![{DENSE}가-힣])[^\W_])+"
                       rf"(?:[-_.:#/](?:(?![{DENSE}가-힣])[^\W_])+)*(?![^\W{DENSE}가-힣])", "0"),
        ("identifier", r"\b[^\W\d_]+(?:_[^\W_]+)+\b|(?<![\w.])--?[a-z][\w-]+\b|`[^`\n]{1,80}`|#\d+", ""),

)
RULES: tuple[Rule, ...] = tuple(
    Rule(kind, re.compile(pattern, re.IGNORECASE), frozenset(needs.split()))
    for kind, pattern, needs in _TABLE
)
IDENTIFIER_CASED = re.compile(r"\b(?:[A-Z]{2,}[A-Z0-9+]*|[a-z]+[A-Z]\w*|[A-Z][a-z]+[A-Z]\w*)(?:-\w+)*(?!\w)\+?")
_LOWER_WORDS = """
ok okay i'm i'll i'd i've i lol omg yes no der die das ein eine den dem wir ich я мы он она hi hello hey thanks thank please sure great the a an this that these those
it he she we you they what when where who why how which can could would should will do does did is are was were
and but or so if then also there here my your our their his her its in on at for to from with by as of let
have has had not well oh wow yeah yep nope alright good nice sorry just now
"""
NOT_NAMES = frozenset(_LOWER_WORDS.split())
_CAPITAL = r"(?:[A-ZÀ-ÖØ-ÞА-ЯЁ][\w'’&.-]*\w|(?:[A-Z]\.)+|[A-Z](?=\s|$))"
NAME = re.compile(
    rf"(?:(?:No\.?|#)?(?<![\w.-])\d{{1,6}}[\w-]{{0,8}}\s{{1,3}})?{_CAPITAL}"
    rf"(?:(?:[ ]|(?<!\b[A-Z][a-z]), (?=[A-Z][A-Za-z]\b)|(?<=[a-z]), (?=[A-Z][a-z]+[.?!;]?(?:\s[a-z]|$)))(?:(?:of|the|de|del|la|le|von|van|der|den|y|&|and|for|at|by|vs\.?|zu|am)[ ]){{0,2}}{_CAPITAL}"
    r"|[ ]\d+\b(?![:.%]\d))*"
)
QUOTED_NAME = re.compile(
    r"“[^“”\n]{2,80}”|\"[^\"\n]{2,80}\"|«[^«»\n]{2,80}»|„[^„“\n]{2,80}“|「[^「」\n]{1,60}」|《[^《》\n]{1,60}》"
)
KATAKANA = re.compile(r"[ァ-ヶー・]{3,}")
LATIN_IN_DENSE = re.compile(rf"(?<=[{DENSE}])[A-Za-z][\w.+-]*|[A-Za-z][\w.+-]*(?=[{DENSE}])")

FORBIDS = re.compile(
    r"(?:(?:^|[.;:,!?—–-]\s*|\b(?:and|but|so|please|also|just|then|or|bitte|por favor|пожалуйста)\s+)"
    r"(?:please\s+)?(?:do\s+not|don['’]?t|never)|\b(?:must\s+not|mustn['’]t|should\s+not|shouldn['’]t|may\s+not|must\s+never))"
    r"\s+(?!(?:know|think|have|see|care|mind|remember|believe|understand|worry|get|need|really|even|like|want an?|it\b"
    r"|you\b|we\b|i\b|they\b|be surprised))"
    r"|\b(?:under no circumstances|make sure (?:not|you don|that no)|i (?:do not|don['’]t) want you|is (?:forbidden"
    r"|off[- ]limits|not allowed|prohibited)|are (?:forbidden|off[- ]limits|not allowed|prohibited)|refrain from"
    r"|without (?:asking|telling|my|touching|changing|deleting)|no more \w+ing|stop \w+ing|avoid \w+|leave \w+ (?:alone|as it is)"
    r"|only if i|not allowed to|from now on|always (?:use|answer|reply|write|ask|keep|call|respond|format|include)"
    r"|(?:please )?remember (?:that|to)|keep in mind|no matter what|i(?:'m| am) allergic|as a rule)\b"
    r"|(?:^|[.;:,!?]\s*|\bund\s+|\bbitte\s+|\baber\s+)(?:[^\W\d_]+\s+){0,6}(?:nicht|niemals|nie|keine?[nmrs]?|auf keinen fall)\b"
    r"[^.!?]{0,80}!?|\b(?:verboten|darfst (?:du )?(?:nicht|kein)|dürfen (?:Sie )?(?:nicht|kein)|unterlasse|ab (?:jetzt|sofort))\b"
    r"|\b(?:no|nunca|jamás)\s+(?:lo |la |los |las |me |le |se |te )?[^\W\d_]+(?:as|es|a|e|an|en|ar|er|ir)\b|\b(?:prohibido"
    r"|bajo ningún concepto|de ahora en adelante|sin (?:preguntar|permiso))\b"
    r"|\b(?:не|никогда не|нельзя|ни в коем случае|запрещено|запрещаю|больше не|с этого момента)\s+[^\W\d_]+"
    r"|\b(?:a partir de ahora|отныне)\b|지\s*(?:마세요|마십시오|마라|말아|말고|마\b)|(?:안|않)\s?(?:됩니다|돼|된다)|금지|절대로?\s|앞으로는|이제부터"
    r"|\bne\s+[^\W\d_]+\s+(?:pas|jamais|rien)\b|\bn['’][^\W\d_]+\s+(?:pas|jamais)\b|\b(?:interdit|désormais)\b"
    r"|不要|不得|不许|不許|不准|不能|不可|禁止|切勿|请勿|請勿|勿|别(?:再|把|去|动|改|删|用|发|碰|忘)|別(?:再|把|去|動|改|刪|用)|千万别|严禁|从现在起|以后都"
    r"|(?:し|ら|か|さ|ま|べ|え|け|げ|せ|て|め|れ|触)?ない(?:で(?:ください|下さい|くれ|ね)?|こと)|してはいけ|てはならな|ては(?:だめ|ダメ)|禁止|絶対に|今後は",
    re.IGNORECASE,
)
DECIDES = re.compile(
    r"\b(?:(?:we|i)(?:['’]ve| have)? (?:decided|agreed|settled|chose|approved|picked)|let['’]?s (?:go with|use|take|do|stick|keep (?:the|this|that|it|to|our \w+ (?:at|in|on)))"
    r"|(?:i|we)['’]?(?:ll| will) (?:take|go with|use|stick with)|decision|it is decided|go(?:ing)? with"
    r"|(?:agreed|approved|confirmed|signed off|final)(?:\b(?= (?:on|to|by|that|with|:)))|instead of|changed? my mind"
    r"|actually,|correction|scratch that|(?:no|sorry|wait),? (?:i mean|make (?:it|that))|make (?:it|that) \w+ instead"
    r"|haben (?:uns|wir uns)[^.!?]{1,80}entschieden|lieber (?:um|am|im|den|die|das)|лучше (?:в|на|завтра)"
    r"|wir (?:haben )?(?:entschieden|beschlossen|nehmen)|ich nehme|entscheidung|stattdessen|korrektur|doch lieber"
    r"|(?:hemos )?decid(?:ido|imos|í)|acordamos|en su lugar|mejor (?:el|la|a las)|corrección|me quedo con"
    r"|решили|решил[аи]?|договорились|вместо этого|исправление|поправка|выбираю|берём|décid[ée]|plutôt)\b"
    r"|决定|決定|选定|選定|就用|就选|确定用|改成|改为|改為|更正|而不是|同意|に決め|にします|に変更|訂正|やっぱり|合意"
    r"|결정했|결정하|확정|기로\s?(?:했|하)|변경해|바꿔|바꾸|대신|로 할게요|정정",
    re.IGNORECASE,
)
NEGATION = re.compile(
    r"\b(?:no|not|never|none|neither|nor|without|cannot|[^\W\d_]+n['’]t|nicht|kein(?:e[nmrs]?)?|nie(?:mals)?|ohne|nunca|jamás"
    r"|sin|tampoco|ningun[oa]?|ningún|не|нет|ни|без|никогда|pas|jamais|sans|aucune?)\b"
    r"|않|없(?=[다어습는음])|(?<!\w)(?:안|못)(?=\s)"
    r"|不|没|沒|無|无|未|非|ない|ません|なかった|ず(?=に)",
    re.IGNORECASE,
)
SMALL_TALK = re.compile(
    r"\b(?:no (?:problem|thanks|thank|worries|doubt|idea|need|way|more help|that|it|i|,)|not (?:really|sure|only|at the moment|now|much|bad)"
    r"|don['’]?t (?:know|think|worry|mind|need|have any)|do not (?:know|need|worry|mind)|can['’]?t (?:wait|believe|imagine|help)|isn['’]?t it"
    r"|didn['’]?t (?:know|you)|why (?:not|don)|won['’]?t you|nothing else|keine? (?:ahnung|problem|sorge)|no (?:hay problema|gracias|sé))"
    r"|문제없|괜찮|별말씀|не за что|нет проблем|没问题|沒問題|没关系|不客气|不好意思|不错|不過|不过",
    re.IGNORECASE,
)  # fmt: skip
CLAUSE_END = re.compile(r"[,;:.!?\n。！？；，、]|\s[-–—]\s")
GERMAN = re.compile(r"\b(?:der|die|das|und|ist|nicht|ich|wir|ein|eine|für|mit|auf)\b")
SENTENCE_EDGE = re.compile(r"(?:^|[.!?:…。！？\n\"“”«»„\]\)>•-])\s*$")
WORD = re.compile(rf"[{DENSE}]|[^\W_]+(?:['’-][^\W_]+)*")
