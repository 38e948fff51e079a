"""English beside the generated Chinese: translations of the texts that the book's pages show.

They are of the rows in ``data/headlines`` and of what the tiny model wrote for them in the reference run. A text
that is not among them, as another run may write it, has no English here.
"""

from collections.abc import Mapping

from pardemo.tables import show

ENGLISH = {
    # a row of the training file
    "请写出下面新闻的栏目、数字和标题。\n": "Write section, number and headline of the news below.",
    "贺岁档的竞争一年比一年激烈。9月3日下午，电影《夏河》上映第17天票房突破6亿元。"
    "主演高永洁说，为了角色学了4个月方言。":
        "The holiday season's films compete harder each year. On the afternoon of 3 September, its 17th day, the film "
        "“Xiahe” passed 600 million yuan at the box office. Its lead, Gao Yongjie, said that the role took four months "
        "of learning a dialect.",
    "《文化》电影《夏河》票房突破6亿元": "《Culture》The film “Xiahe” passes 600 million yuan at the box office",
    # one headline of each group
    "《民生》月薪7700元起，屹禾物流招聘380名质检员":
        "《People's life》From 7,700 yuan a month, Yihe Logistics hires 380 inspectors",
    "《灾情》17个航班取消，柳坪发布暴雨黄色预警": "《Disasters》17 flights cancelled, Liuping warns of heavy rain",
    "《财经》芦湾去年水产出口增长63.4%": "《Economy》Luwan's seafood exports grew by 63.4 % last year",
    # the lantern festival
    "松渡湖景区昨天首次举办灯会，吸引游客7.5万人次。景区增开了16辆摆渡车，延长了开放时间。"
    "另据介绍，当地的慈善活动累计帮助了400户困难家庭。":
        "Songdu Lake Park held its first lantern festival yesterday, drawing 75,000 visitors. The park ran 16 more "
        "shuttles and opened longer. Local charities have also helped 400 families in need.",
    "《文化》吸引游客7.5万人次，松渡湖景区举办灯会":
        "《Culture》Drawing 75,000 visitors, Songdu Lake Park holds a lantern festival",
    "松渡湖景区昨天首次举办灯会，吸引游客7.5万人次。":
        "Songdu Lake Park held its first lantern festival yesterday, drawing 75,000 visitors.",
    "区增开了26辆摆渡车，延长了开放时间。": "(…)rk ran 26 more shuttles and opened longer.",
    "松渡湖景区举办灯会，吸引游客7.5万人次": "Songdu Lake Park holds a lantern festival, drawing 75,000 visitors",
    # four rows of new kinds of event
    "《文化》藏书184万册，菱岭少儿图书馆开门迎客": "《Culture》1.84 million books, Lingling Children's Library opens",
    "菱岭少儿图书馆终于开门迎客，藏书1840万册": "Lingling Children's Library opens at last, 18.4 million books",
    "《民生》藏书184万册，菱岭少儿图书馆终于开门迎客":
        "《People's life》1.84 million books, Lingling Children's Library opens at last",
    "《体育》砚塘女子马拉松吸引4100人报名": "《Sports》Yantang Women's Marathon draws 4,100 entrants",
    "砚塘女子马拉松吸引4100人报名": "Yantang Women's Marathon draws 4,100 entrants",
    "《交通》砚塘女子马拉松吸引4100人，砚塘女子马拉松吸引4100":
        "《Traffic》Yantang Women's Marathon draws 4,100, Yantang Women's Marathon draws 4,100",
    "《民生》惠及15所学校，朔航科技捐赠2300件棉衣":
        "《People's life》For 15 schools, Shuohang Technology gives 2,300 padded coats",
    "朔航科技捐赠赠2300件棉衣，惠及15所学校": "Shuohang Technology gives gives 2,300 padded coats, for 15 schools",
    "《科技》惠及15所学校，惠及15所学校": "《Technology》For 15 schools, for 15 schools",
    "《财经》货值57.1亿元，莲浦向海外出口玩具": "《Economy》Worth 5.71 billion yuan, Lianpu exports toys overseas",
    "莲浦首向海外出口玩具，货值57.1亿元": "Lianpu first exports toys overseas, worth 5.71 billion yuan",
    "《科技》货值57.1亿元，莲浦首少合年出固玩具": "《Technology》Worth 5.71 billion yuan, Lianpu (no Chinese) toys",
}  # fmt: skip


def english_of(text: str) -> str:
    """A text's English, or ``—`` where there is none."""
    return ENGLISH.get(text, "—")


def beside_english(*tables: Mapping[str, str]):
    """A table of texts by name, one below the other, each beside its English."""
    rows = (row for table in tables for row in table.items())
    return show([{"": name, "text": text, "in English": english_of(text)} for name, text in rows])
