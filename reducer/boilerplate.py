"""Boilerplate: lines that belong to the page and not to what it says, recognised by their words alone.

A line is boilerplate only if the page's furniture explains all of it: navigation words and nothing else, a copyright or
licence mark, a cookie notice, a breadcrumb. A line with any other word stays, so an unknown site keeps a menu and loses
no sentence:

    Home | About us | Contact          removed, every item is a navigation word
    Home | Opening hours | Contact     stays
"""

import re

MAX_CHARS = 300
"""A longer line says something, whatever words it holds."""

MAX_OWNER_START = 60
"""A copyright mark later in a sentence belongs to what the sentence says."""

_ITEMS = """
home|home page|homepage|main page|menu|main menu|search|log in|login|log out|logout|sign in|sign up|sign out|register
create account|my account|account|subscribe|subscribe now|newsletter|share|share this page|share this article
share this|share on|tweet|email|e-mail|print|print this page|facebook|twitter|instagram|youtube|linkedin
whatsapp|pinterest|reddit|telegram|rss
contact|contact us|about|about us|imprint|help|faq|faqs|sitemap|site map|careers|jobs|press|advertise
advertise with us|advertisement|advertising|sponsored|terms|terms of use|terms of service|terms and conditions|privacy
privacy policy|privacy notice|privacy statement|cookie policy|cookie settings|cookie preferences|cookies|manage cookies
accessibility|accessibility statement|legal|legal notice|disclaimer|back to top|top|back|next|previous|next page
previous page|read more|show more|load more|more|see all|view all|learn more|related articles|related posts|related
most read|most popular|trending|skip to content|skip to main content|skip to navigation|toggle navigation|close
open menu|close menu|accept|accept all|accept all cookies|reject all|decline|comments|leave a comment|reply|follow us
follow|download app|download the app|loading|was this page helpful? yes no|was this page helpful|feedback|language
all rights reserved
startseite|suche|anmelden|registrieren|impressum|datenschutz|datenschutzerklärung|kontakt|über uns|agb|drucken|teilen
mehr lesen|weiterlesen|nach oben|zum inhalt springen|hilfe|cookie-einstellungen|alle akzeptieren|alle ablehnen
inicio|buscar|iniciar sesión|registrarse|aviso legal|política de privacidad|política de cookies|contacto|sobre nosotros
imprimir|compartir|leer más|volver arriba|ayuda|aceptar|aceptar todo|rechazar
accueil|rechercher|connexion|se connecter|s'inscrire|mentions légales|politique de confidentialité|à propos|imprimer
partager|lire la suite|haut de page|aide|accepter|tout accepter|tout refuser
главная|поиск|войти|вход|регистрация|контакты|о нас|о компании|политика конфиденциальности|печать|поделиться
читать далее|наверх|реклама|подписаться|помощь|карта сайта
首页|返回首页|网站首页|主页|登录|登陆|注册|立即登录|立即注册|退出|搜索|菜单|分享|分享到|分享至|分享到微信|微信|微博|新浪微博
朋友圈|QQ空间|qq|打印|打印本页|关闭|关闭窗口|收藏|举报|评论|点赞|返回|返回顶部|上一篇|下一篇|上一页|下一页|更多|查看更多
点击查看更多|阅读全文|展开全文|相关阅读|相关新闻|相关推荐|相关文章|热门推荐|热点推荐|推荐阅读|热门搜索|热搜|关于我们|联系我们
网站地图|广告服务|广告|友情链接|免责声明|版权声明|隐私政策|用户协议|服务条款|法律声明|客户端|下载客户端|公众号|微信公众号|扫一扫
扫一扫在手机打开当前页面|用微信扫码二维码|分享至好友和朋友圈|字号|大|中|小|正文|忘记密码|还没账号|网站简介|加入我们|投稿|合作
繁体|简体|无障碍|手机版|电脑版|English|打开客户端|打开app|未登录|已有账号|暂无账号|评论在审核通过后将对所有人可见
ホーム|ログイン|会員登録|検索|メニュー|お問い合わせ|プライバシーポリシー|利用規約|サイトマップ|会社概要|印刷|シェア|もっと見る
続きを読む|ページトップへ|トップへ戻る|広告
홈|로그인|회원가입|검색|메뉴|문의하기|개인정보처리방침|이용약관|사이트맵|회사소개|인쇄|공유|더보기|맨 위로|광고
"""
_NAVIGATION = frozenset(
    item.strip().casefold() for line in _ITEMS.strip().splitlines() for item in line.split("|") if item.strip()
)

_SEPARATORS = re.compile(r"\s*[|丨｜·•/>›»,，、;:：；。!！?？\[\]【】()（）«‹←→↑-]+\s*|\s{2,}")
_SENTENCES = re.compile(r"(?<=[。！？])(?=[^”’」』）)])\s?|(?<=[^.\s]{3}[.!?]) ")
_SPACES = re.compile(r"\s+")
_OWNER = re.compile(
    r"(?:©|\(c\)|&copy;)\s*(?:copyright\s*)?(?:19|20)\d\d|copyright\s*(?:©|\(c\)|&copy;|(?:19|20)\d\d)"
    r"|all rights reserved|alle rechte vorbehalten|todos los derechos reservados|tous droits réservés"
    r"|все права защищены|版\s?[权權]\s?所\s?有|モノの無断転載|無断転載を禁|무단\s?전재"
    r"|ICP\s?[备證证]|公网安备|网站标识码|许可证[\w\[（(]*\d{4,}|未经授权禁止|未經授權|转载请注明出处",
    re.IGNORECASE,
)
_COOKIE = re.compile(
    r"\b(?:we|site|website|page|wir|seite|website|nous|site|utilizamos|sitio|мы|сайт)\b[^.]{0,60}\b(?:cookies?|куки)\b"
    r"|\bcookies?\b[^.]{0,80}\b(?:accept|agree|consent|experience|preferences|settings|einverstanden|akzeptieren"
    r"|zustimm|accepte[rz]|aceptar|acepta|consentimiento)"
    r"|(?:本站|本网站|我们)[^。]{0,20}cookie",
    re.IGNORECASE,
)
_CONSENT = re.compile(
    r"accept|agree|consent|experience|continu|analy|personali|improve|prefer|setting|browsing|einverstanden|akzeptier"
    r"|zustimm|verbesser|mejorar|acept|améliorer|utilis|同意|接受|体验|соглас",
    re.IGNORECASE,
)
_CRUMB_START = re.compile(
    r"(?:you are here|sie sind hier|usted está aquí|vous êtes ici|当前位置|您现在的位置|您的位置|所在位置)\s*[:：]?"
    r"|(?:home|startseite|inicio|accueil|главная|[\w\s]{0,6}首页)\s*(?:>|›|»|/|&gt;|&raquo;)",
    re.IGNORECASE,
)
_PLEA = re.compile(
    r"(?:(?:jump|skip) to (?:main |site |page )?(?:navigation|search|content|footer|menu|results)\W*)+"
    r"|(?:please )?(?:enable|activate|turn on) javascript\b.*|your browser (?:does not|doesn't) support .*"
    r"|(?:subscribe|sign up) (?:to|for) (?:our|the) .{0,20}newsletter.{0,60}|follow us on .{0,60}"
    r"|(?:share|tweet|post) (?:this )?(?:on|via) .{0,40}|click here (?:to|for) (?:share|print|subscribe).{0,40}"
    r"|get our (?:free )?app.{0,40}|advertisement|-+ ?advertisement ?-+|scroll to continue"
    r"|(?:page|seite|página|стр\.?) \d{1,4}(?: ?(?:of|/|von|de|из) ?\d{1,4})?"
    r"|第 ?\d{1,4} ?页(?: ?[/／共,，]+ ?\d{1,4} ?页)?"
    r"|.{0,12}(?:扫描|长按|扫码).{0,6}二维码.{0,12}|.{0,8}(?:点击|请)?下载.{0,12}客户端.{0,8}"
    r"|打开客户端.{0,10}|返回.{0,6}首页.{0,8}",
    re.IGNORECASE,
)
_NEEDLES = (
    "cookie", "куки", "©", "(c)", "&copy;", "copyright", "reserv", "vorbehalten", "réservés", "защищены", "版",
    "無断転載", "무단", "备", "備", "公网安", "标识码", "许可证", "授权", "授權", "转载", ">", "›", "»", "&gt;", "/",
    "位置", "二维码", "客户端", "javascript", "browser", "newsletter", "follow us", "share", "tweet", "post",
    "click here", "get our", "jump to", "skip to",
    "advertisement", "scroll", "page", "seite", "página", "стр", "页", "here", "hier", "ici", "aquí",
)  # fmt: skip
"""One of these stands in every line that is boilerplate by anything but its navigation words."""
_STRONG_NEEDLES = ("cookie", "куки", "©", "copyright", "reserved", "版权", "版權", "版 权", "icp", "公网安", "许可证")
_FIRST_WORD = re.compile(r"[^\s|丨｜·•/>›»,，、;:：；。!！?？\[\]【】()（）«‹←→↑.…-]+")
_FIRST_WORDS = frozenset(match.group() for item in _NAVIGATION if (match := _FIRST_WORD.match(item)))


def is_boilerplate(line: str) -> bool:
    """Whether a line, without line breaks, is page furniture and nothing else."""
    if len(line) > MAX_CHARS:
        return False
    if is_navigation(line.strip()):
        return True
    folded = line.casefold()
    if not any(needle in folded for needle in _NEEDLES):
        return False
    text = _SPACES.sub(" ", line).strip()
    sentences = _SENTENCES.split(text)
    if len(sentences) > 1:
        return all(is_boilerplate(sentence) for sentence in sentences if sentence)
    owner = _OWNER.search(text)
    return (
        (owner is not None and owner.start() <= MAX_OWNER_START and len(text) <= 200)
        or bool(_CRUMB_START.match(text) and _is_crumb(text))
        or bool(_COOKIE.search(text) and _CONSENT.search(text))
        or bool(_PLEA.fullmatch(text.rstrip(".。!！ ")))
    )


def is_navigation(line: str) -> bool:
    """Whether every item of a line is a word of navigation; one or two characters alone prove nothing."""
    if len(line) < 2 or len(line) > MAX_CHARS:
        return False
    first = _FIRST_WORD.search(line)
    if first is None or first.group().casefold() not in _FIRST_WORDS:
        return False
    if line.casefold() in _NAVIGATION and (" " in line or (len(line) > 3 and not line.isascii())):
        return True
    items = [item for item in (item.strip(" .…").casefold() for item in _SEPARATORS.split(line)) if item]
    if not items or not all(map(_is_navigation_item, items)):
        return False
    # A single common word ("More", "Help") may be a heading or an answer.
    return len(items) > 1 or " " in items[0] or (len(items[0]) > 3 and not items[0].isascii())


def _is_navigation_item(item: str) -> bool:
    """An item, or several written side by side: ``Menu Search Log in``."""
    if item in _NAVIGATION:
        return True
    found = 0
    words = item.split(" ")
    position = 0
    while position < len(words):
        for length in (4, 3, 2, 1):
            if " ".join(words[position : position + length]) in _NAVIGATION and position + length <= len(words):
                position += length
                found += 1
                break
        else:
            return False
    return found > 1


def _is_crumb(text: str) -> bool:
    """A path has a step for every few words and ends without a full stop."""
    steps = re.split(r"\s*(?:>>?|›|»|&gt;|&raquo;)\s*", text)
    return len(text) <= 120 and text[-1] not in ".。!！?？" and len(steps) >= 2 and max(map(len, steps)) <= 60


def may_hold_boilerplate(text: str) -> bool:
    """A cheap look at a whole passage: whether it is worth looking at its lines."""
    if "\n" in text or "  " in text or "\u3000" in text or "\t" in text:
        return True
    return may_hold_notice(text)


def may_hold_notice(text: str) -> bool:
    """A cheap look at a text: whether one of its sentences may be a cookie notice or a copyright or licence line."""
    folded = text.casefold()
    return any(needle in folded for needle in _STRONG_NEEDLES)
