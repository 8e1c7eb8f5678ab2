"""The fact guard in seven languages: what differs in one fact stays apart, what states the same is one.

Every pair goes through dedup as a passage with text before and after it, as a copy would.
"""

import pytest
from factories_reducer import make_passages

from reducer.config import DedupConfig
from reducer.dedup import deduplicate
from reducer.stage import Candidate

Pair = tuple[str, str]

DIFFERENT: dict[str, list[Pair]] = {
    "en": [
        ("The plan costs 240 dollars a year.", "The plan costs 480 dollars a year."),
        ("The plan costs two hundred dollars.", "The plan costs three hundred dollars."),
        ("The deadline is 3 May 2025.", "The deadline is 3 May 2026."),
        ("The deadline is 05/03/2025.", "The deadline is 05/04/2025."),
        ("The range is 5 km.", "The range is 5 miles."),
        ("The fee is $20.", "The fee is €20."),
        ("Anna Weber signed the contract.", "Dana Weber signed the contract."),
        ("Unit QX-417-KD failed.", "Unit QX-471-KD failed."),
        ("The refund is available.", "The refund is not available."),
        ("The refund is available.", "The refund is unavailable."),
        ("The valve opens above 12 bar.", "The valve opens below 12 bar."),
        ("All members may vote.", "Some members may vote."),
        ("Sales rose by 5 %.", "Sales fell by 5 %."),
        ("You can park here.", "You can't park here."),
        ("Version 2.1 is supported.", "Version 2.10 is supported."),
        ("At least 5 people are needed.", "At most 5 people are needed."),
        ("The loss was 1.5 million.", "The loss was 1.5 billion."),
        ("Iraq borders Iran.", "Iran borders Iraq."),
    ],
    "zh": [
        ("该套餐每年费用为二百四十元。", "该套餐每年费用为四百八十元。"),
        ("该套餐每年费用为２４０元。", "该套餐每年费用为４８０元。"),
        ("截止日期为2025年5月3日。", "截止日期为2026年5月3日。"),
        ("截止日期为五月三日。", "截止日期为六月三日。"),
        ("射程为五公里。", "射程为五英里。"),
        ("费用为20美元。", "费用为20欧元。"),
        ("杨利娟签署了合同。", "李利娟签署了合同。"),
        ("型号QX-417发生故障。", "型号QX-471发生故障。"),
        ("可以退款。", "不可以退款。"),
        ("会议已取消。", "会议未取消。"),
        ("所有会员均可投票。", "部分会员可投票。"),
        ("销售额上升了百分之五。", "销售额下降了百分之五。"),
        ("亏损一点五亿元。", "亏损一点五万元。"),
        ("压力高于12巴时开启。", "压力低于12巴时开启。"),
    ],
    "ja": [
        ("年間料金は二百四十円です。", "年間料金は四百八十円です。"),
        ("年間料金は２４０円です。", "年間料金は４８０円です。"),
        ("締め切りは2025年5月3日です。", "締め切りは2026年5月3日です。"),
        ("射程は五キロです。", "射程は五マイルです。"),
        ("料金は20ドルです。", "料金は20ユーロです。"),
        ("田中さんが契約に署名しました。", "田村さんが契約に署名しました。"),
        ("返金できます。", "返金できません。"),
        ("会議は中止された。", "会議は中止されなかった。"),
        ("全員が投票できる。", "一部が投票できる。"),
        ("売上は5％増えた。", "売上は5％減った。"),
        ("カードは使えます。", "ガードは使えます。"),
        ("昭和五十年に開業した。", "平成五十年に開業した。"),
    ],
    "ko": [
        ("연간 요금은 240원입니다.", "연간 요금은 480원입니다."),
        ("마감일은 2025년 5월 3일입니다.", "마감일은 2026년 5월 3일입니다."),
        ("사거리는 5킬로미터입니다.", "사거리는 5마일입니다."),
        ("요금은 20달러입니다.", "요금은 20유로입니다."),
        ("김민수가 계약에 서명했다.", "김민호가 계약에 서명했다."),
        ("환불이 가능합니다.", "환불이 불가능합니다."),
        ("계약은 유효하다.", "계약은 유효하지 않다."),
        ("회의에 참석했다.", "회의에 못 참석했다."),
        ("모든 회원이 투표할 수 있다.", "일부 회원이 투표할 수 있다."),
        ("매출이 5% 증가했다.", "매출이 5% 감소했다."),
        ("이백사십 명이 왔다.", "사백팔십 명이 왔다."),
    ],
    "de": [
        ("Der Tarif kostet 240 Euro im Jahr.", "Der Tarif kostet 480 Euro im Jahr."),
        ("Der Tarif kostet zweihundert Euro.", "Der Tarif kostet dreihundert Euro."),
        ("Frist ist der 3. Mai 2025.", "Frist ist der 3. Mai 2026."),
        ("Frist ist der 3. Mai.", "Frist ist der 3. Juni."),
        ("Die Reichweite beträgt 5 km.", "Die Reichweite beträgt 5 m."),
        ("Die Gebühr beträgt 20 €.", "Die Gebühr beträgt 20 $."),
        ("Der Verlust betrug 1,5 Millionen.", "Der Verlust betrug 15 Millionen."),
        ("Anna Weber unterschrieb.", "Anna Weser unterschrieb."),
        ("Der Vertrag ist gültig.", "Der Vertrag ist nicht gültig."),
        ("Der Vertrag ist gültig.", "Der Vertrag ist ungültig."),
        ("Es gibt eine Erstattung.", "Es gibt keine Erstattung."),
        ("Das Ventil öffnet vor 12 Uhr.", "Das Ventil öffnet nach 12 Uhr."),
        ("Der Umsatz stieg um 5 %.", "Der Umsatz sank um 5 %."),
    ],
    "es": [
        ("El plan cuesta 240 euros al año.", "El plan cuesta 480 euros al año."),
        ("El plan cuesta doscientos euros.", "El plan cuesta trescientos euros."),
        ("El plazo es el 3 de mayo de 2025.", "El plazo es el 3 de mayo de 2026."),
        ("El plazo es el 3 de mayo.", "El plazo es el 3 de junio."),
        ("El alcance es de 5 km.", "El alcance es de 5 millas."),
        ("La cuota es de 20 €.", "La cuota es de 20 $."),
        ("Ana Pérez firmó el contrato.", "Ana Peréz Gil firmó el contrato."),
        ("El contrato es válido.", "El contrato no es válido."),
        ("El contrato es válido.", "El contrato es inválido."),
        ("Siempre hay reembolso.", "Nunca hay reembolso."),
        ("Las ventas subieron un 5 %.", "Las ventas bajaron un 5 %."),
        ("Abre antes de las 12.", "Abre después de las 12."),
        ("Tiene 4 años.", "Tiene 4 anos."),
    ],
    "ru": [
        ("Тариф стоит 240 рублей в год.", "Тариф стоит 480 рублей в год."),
        ("Тариф стоит двести рублей.", "Тариф стоит триста рублей."),
        ("Срок — 3 мая 2025 года.", "Срок — 3 мая 2026 года."),
        ("Срок — 3 мая.", "Срок — 3 июня."),
        ("Дальность составляет 5 км.", "Дальность составляет 5 миль."),
        ("Взнос составляет 20 ₽.", "Взнос составляет 20 $."),
        ("Анна Вебер подписала договор.", "Анна Вебель подписала договор."),
        ("Договор действителен.", "Договор не действителен."),
        ("Договор действителен.", "Договор недействителен."),
        ("Возврат возможен.", "Возврат невозможен."),
        ("Продажи выросли на 5 %.", "Продажи упали на 5 %."),
        ("Все члены голосуют.", "Некоторые члены голосуют."),
        ("Открыто до 12 часов.", "Открыто после 12 часов."),
    ],
}

SAME: dict[str, list[Pair]] = {
    "en": [
        ("The plan costs $1,240 a month.", "the  plan costs  $1240 a MONTH"),
        ("“It is open” - she said.", '"It is open" — she said'),
        ("The plan costs two hundred and forty dollars.", "The plan costs 240 dollars."),
        ("Revenue was １２０ million.", "Revenue was 120 million."),
        ("<p>It&nbsp;opened in <b>1990</b>.</p>", "It opened in 1990."),
    ],
    "zh": [
        ("该套餐每年费用为二百四十元。", "该套餐每年费用为240元。"),
        ("截止日期为二〇二五年五月三日。", "截止日期为２０２５年５月３日"),
        ("亏损三亿二千万元，所有会员均可投票。", "亏损320000000元,所有会员均可投票."),
    ],
    "ja": [
        ("年間料金は二百四十円です。", "年間料金は２４０円です"),
        ("締め切りは二〇二五年五月三日です。", "締め切りは2025年5月3日です。"),
        ("カードは使えます。", "ｶｰﾄﾞは使えます。"),
    ],
    "ko": [
        ("연간 요금은 1,240원입니다.", "연간 요금은 １２４０원입니다"),
        ("계약은 “유효”하다.", '계약은 "유효"하다'),
    ],
    "de": [
        ("Der Tarif kostet 240 Euro im Jahr.", "der tarif kostet 240 EURO im Jahr"),
        ("Die „Frist“ endet – heute.", 'Die "Frist" endet - heute'),
        ("Die Straße ist gesperrt.", "DIE STRASSE IST GESPERRT."),
    ],
    "es": [
        ("El plan cuesta 240 euros al año.", "EL PLAN CUESTA 240 EUROS AL AÑO"),
        ("«El contrato» es válido.", '"El contrato" es válido'),
    ],
    "ru": [
        ("Тариф стоит 240 рублей в год.", "ТАРИФ СТОИТ 240 РУБЛЕЙ В ГОД"),
        ("«Договор» действителен — сегодня.", '"Договор" действителен - сегодня'),
    ],
}

FRAME: dict[str, Pair] = {
    "en": ("The office is in Leeds and has a garden. ", " The canteen serves soup on Mondays and fish on Fridays."),
    "zh": ("办公室位于利兹，设有花园。", "食堂周一供应汤，周五供应鱼。"),
    "ja": ("事務所はリーズにあり、庭があります。", "食堂では月曜日にスープ、金曜日に魚を出します。"),
    "ko": ("사무실은 리즈에 있으며 정원이 있습니다. ", " 식당은 월요일에 수프를, 금요일에 생선을 제공합니다."),
    "de": ("Das Büro liegt in Leeds und hat einen Garten. ", " Die Kantine bietet montags Suppe und freitags Fisch."),
    "es": ("La oficina está en Leeds y tiene un jardín. ", " El comedor sirve sopa los lunes y pescado los viernes."),
    "ru": ("Офис находится в Лидсе, при нём есть сад. ", " В столовой по понедельникам суп, по пятницам рыба."),
}


def num_kept(language: str, pair: Pair) -> int:
    before, after = FRAME[language]
    passages = make_passages(*(before + text + after for text in pair))
    candidates = [Candidate(passage, position, 1, 1, (passage.id,)) for position, passage in enumerate(passages)]
    return len(deduplicate(candidates, DedupConfig()).kept)


@pytest.mark.parametrize(
    ("language", "pair"), [(language, pair) for language, pairs in DIFFERENT.items() for pair in pairs]
)
def test_one_other_fact_keeps_both(language: str, pair: Pair) -> None:
    assert num_kept(language, pair) == 2
    assert num_kept(language, (pair[1], pair[0])) == 2


@pytest.mark.parametrize(("language", "pair"), [(language, pair) for language, pairs in SAME.items() for pair in pairs])
def test_the_same_written_otherwise_is_one(language: str, pair: Pair) -> None:
    assert num_kept(language, pair) == 1


@pytest.mark.parametrize(
    ("language", "pair"), [(language, pair) for language, pairs in DIFFERENT.items() for pair in pairs]
)
def test_one_other_fact_keeps_both_also_when_the_rest_of_one_passage_is_missing(language: str, pair: Pair) -> None:
    before, after = FRAME[language]
    passages = make_passages(before + pair[0], before + pair[1] + after)
    candidates = [Candidate(passage, position, 1, 1, (passage.id,)) for position, passage in enumerate(passages)]
    assert len(deduplicate(candidates, DedupConfig()).kept) == 2
