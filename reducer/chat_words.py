"""Words of talk: they are in every conversation and say little on any topic."""

_CHAT_WORDS = """
able absolutely actually added again ago agree ahead all almost alone along already alright also although always
amazing another answer any anybody anyone anything anyway appreciate around arrive ask asked asking available away
awesome back bad because become been before began begin behind being believe best bet better between big bit blast
both bring brings brought bunch bye call called came catch certain certainly chance change changed chat check chill
choose clear clearly close come comes coming confirm confirmed confirming consider continue cool correct could couple
course crazy curious cute dang day days deal decided definitely describe detail details did different difficult does
doing done down during each early easily easy either else end ended endless enjoy enjoyed enjoying enjoys enough
entire especially even ever every everybody everyone everything exactly excellent excited exciting expect extra
extremely fact fantastic far feel feeling feels felt few figure fill filled final finally find fine finish finished
first follow following forget forward found front full fully fun gave get gets getting give gives giving glad goes
going goodbye gone gonna good got gotta great guess guys had hand hang happen happened happening happens happy hard
hardly hear heard hello help helped helpful helping helps here hey hold honestly hope hopefully hoping how however
huge idea imagine important inside inspired inspiring instead interested interesting isn just keep keeping keeps kind
kinda knew know known large last lately later learn least leave leaves leaving left less let life like liked likely
little live living long longer look looked looking looks lot lots love loved lovely loves loving low lucky made main
make makes making many match matter maybe mean meaning means meant meet mention mentioned might mind minute moment
moments more most mostly move much name near need needed needs never news next nice nobody none nope normal nothing
now off offer often okay old once one ones only open option options other others out over overall own part particular
pass past perfect perhaps person pic pick picked picture place places plan planning plans pleasant please plenty plus
point possible power powerful pretty probably proud pull push put puts quick quickly quite rather reach ready real
realize really reason reasons regarding remember remind reminds request requested requests rest right rock said same
saw say saying says scheduled search see seeing seem seems seen send sense serves set several share shared shares
sharing short should show showing shows side similar simple simply since small someone something sometimes somewhere
soon sorry sort sound sounded sounds special specific start started starting starts stay step still stuff such suggest
suits sunny super support supposed sure take taken takes taking talk talked talking tell tells test than thank thanks
that's there they thing things think thinking though thought thoughts through throughout time times today together
told too took top total totally touch tough toward tried truly try trying turn two type unique until upcoming use used
useful using usually various very via wait walk wanna want wanted wants was watch way ways week weeks welcome well
went were what's whatever while whole why wild will wish with within without won wonder wonderful word words work
worked working works world worry worth would wow wrong yeah year years yep yes yet you're your yourself aber alles
also ander auch bitte danke dann doch eigentlich etwas ganz gerne gern genau gibt gut habe hallo heißt immer jetzt
kann können könnte machen mal mehr meine möchte muss noch nur oder schon schön sehr sein sollte viel vielleicht werden
wieder will wird würde ahora algo bien bueno claro cosa creo decir estoy está gracias hacer hasta hola más mejor mucho
muy nada necesito otro pues puede puedo quiero sobre también tengo tiene todo tiene vale voy будет было быть вам вас
весь все всё вы да давай даже для ещё здравствуйте его если есть уже меня мне можно мой мы надо нам нас нужно она они
очень пожалуйста просто привет сейчас спасибо так такой там тебе тоже только тут хорошо хочу чтобы это этот
"""
CHAT_WORDS = frozenset(_CHAT_WORDS.split())
"""Words of talk that say little on any topic: they are worth a fraction of a topic's word."""
