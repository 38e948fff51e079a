"""Names, dates and plain figures that all kinds of event share: made up, in the notation of ``events.toml``."""

# Rare first characters, so that no town or company of note is named; a likeness that is left is chance.
_PLACE = "松|桐|梅|鹤|枫|竹|雁|麓|澄|岚|棠|芦|砚|榆|柳|菱|栖|柏|槐|葵|莲|蓝|桑|霁 + 岭|泉|浦|塘|泽|屏|渡|坪|湾|川|台|洲"
_BRAND = "泓|屹|澜|霖|岱|槿|砺|沅|珑|琅|煜|昀|桁|蔚|曜|朔|沐|芷|璟|翊 + 航|禾|石|景|峰|睿|力|康|茂|腾|源|拓|帆|穗|桥"
_PERSON = (
    "王|李|张|刘|陈|杨|赵|黄|周|吴|徐|孙|胡|朱|高|林|何|郭|马|罗|梁|宋|郑|谢|韩|唐|冯|于|董|萧"
    " + |建|志|晓|文|国|明|春|雪|立|永|家|思|嘉|德|云|秀"
    " + 华|平|强|军|伟|芳|敏|杰|磊|宁|峰|玲|辉|涛|洁|斌|燕|琳"
)

SLOTS = {
    "place": _PLACE,
    "brand": _BRAND,
    "company": _BRAND + " + 科技|食品|重工|电子|汽车|医药|能源|建材|物流|纺织",
    "person": _PERSON,
    "date": "1-12 + 月 + 1-28 + 日",
    "when": "日前|昨天|近日|本周三|本周五|{date}|{date}上午|{date}下午",
    "year": "2008-2022",
    "pop": "36-860",
    "weather": "3-9",
    "rank": "2-18",
    "reads": "120-980/10",
    "acts": "2-9",
    "helped": "120-980/10",
}
