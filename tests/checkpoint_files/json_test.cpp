// Json: the text that nlohmann::ordered_json writes, from the same expressions and from the same
// text.
#include "io/json.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

using nlohmann::ordered_json;

// One expression in both types.
template <class J>
J built() {
  const std::vector<std::string> names = {"a", "b\n\"c\"", "é 名", "\x7F\x01"};
  J json;
  json["null"] = nullptr;
  json["numbers"] = {
      1,     -2,  int64_t{1} << 62, std::numeric_limits<uint64_t>::max(), 2.5, 1.702f, 1e-6,
      1e300, -0.0};
  json["bounds"] = {std::numeric_limits<int64_t>::min(), std::numeric_limits<double>::infinity(),
                    std::nan("")};
  json["names"] = names;
  json["layers"] = std::set<int64_t>{3, 1, 2};
  json["pair"] = {"one", "two"};
  json["object"] = {{"one", 1}, {"two", {{"three", {4, 5}}}}, {"list", {"Linear"}}};
  json["empty"] = {{"array", J::array()}, {"object", J::object()}, {"null", J()}};
  json["flag"] = true;
  json["object"]["two"]["more"] = "text";
  json["replaced"] = 1;
  json["replaced"] = "twice";
  J list = J::array();
  list.push_back({{"layer", 1}, {"ok", false}});
  list.push_back({1, 2});
  json["list"] = std::move(list);
  json.update(J{{"flag", false}, {"added", "at the end"}});
  return json;
}

TEST(Json, IsWrittenAsNlohmannWritesIt) {
  for (const int indent : {-1, 0, 2})
    EXPECT_EQ(built<Json>().dump(indent), built<ordered_json>().dump(indent));
  EXPECT_EQ(built<Json>().dump(-1, true), built<ordered_json>().dump(-1, ' ', true));
  const std::string not_text = "a\xFF\xC3z";
  EXPECT_EQ(Json(not_text).dump(),
            ordered_json(not_text).dump(-1, ' ', false, ordered_json::error_handler_t::replace));
}

TEST(Json, IsReadAsNlohmannReadsIt) {
  for (const std::string& text :
       {built<ordered_json>().dump(), std::string(R"({"b":1,"a":2,"b":{"c":[]}})"),
        std::string("[]"), std::string(" 12 "), std::string("-0"), std::string("1E5"),
        std::string("[1,]"), std::string("{\"a\"}"), std::string(""), std::string("nul"),
        std::string("18446744073709551616"), std::string(200, '[') + std::string(200, ']')}) {
    const ordered_json expected = ordered_json::parse(text, nullptr, false);
    const Json json = Json::parse(text);
    EXPECT_EQ(json.is_discarded(), expected.is_discarded()) << text;
    if (!expected.is_discarded()) EXPECT_EQ(json.dump(), expected.dump());
  }
}

// Deeper text would be destroyed and written by equally deep recursion.
TEST(Json, NestsToABoundedDepth) {
  const auto nested = [](size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_TRUE(Json::parse(nested(256)).is_array());
  EXPECT_TRUE(Json::parse(nested(257)).is_discarded());
  EXPECT_TRUE(Json::parse(nested(1000000)).is_discarded());
}

// Object sizes below and above the threshold for a map of names. If names repeat, the last one
// counts and takes the first one's place.
TEST(Json, TheLastOfEqualNamesCounts) {
  for (const int members : {3, 16, 17, 100}) {
    ordered_json expected;
    std::string text = "{";
    for (int i = 0; i < members; ++i)
      text += "\"n" + std::to_string(i) + "\":" + std::to_string(i) + ",";
    for (int i = 0; i < members; i += 2) text += "\"n" + std::to_string(i) + "\":-1,";
    text.back() = '}';
    EXPECT_EQ(Json::parse(text).dump(), ordered_json::parse(text).dump()) << members;
  }
}

TEST(Json, NumbersAreEqualByValue) {
  EXPECT_EQ(Json(1), Json(uint64_t{1}));
  EXPECT_EQ(Json(1), Json(1.0));
  EXPECT_FALSE(Json(-1) == Json(std::numeric_limits<uint64_t>::max()));
  EXPECT_FALSE(Json(1) == Json(true));
  EXPECT_FALSE(Json("1") == Json(1));
  EXPECT_EQ(Json::parse(built<Json>().dump())["numbers"], built<Json>()["numbers"]);
}

// Casting a number to a type that cannot hold it is undefined behaviour.
TEST(Json, NumbersThatATypeCannotHoldAreItsDefault) {
  EXPECT_EQ(Json(1e300).get<int64_t>(), 0);
  EXPECT_EQ(Json(-1e300).get<int64_t>(), 0);
  EXPECT_EQ(Json(0x1p63).get<int64_t>(), 0);
  EXPECT_EQ(Json(-0x1p63).get<int64_t>(), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(Json(std::numeric_limits<double>::quiet_NaN()).get<int64_t>(), 0);
  EXPECT_EQ(Json(-1.0).get<uint64_t>(), 0u);
  EXPECT_EQ(Json(0x1p64).get<uint64_t>(), 0u);
  EXPECT_EQ(Json(7.9).get<int>(), 7);
  EXPECT_EQ(Json(-1).get<uint64_t>(), 0u);
  EXPECT_EQ(Json(int64_t{1} << 40).get<int32_t>(), 0);
  EXPECT_EQ(Json(std::numeric_limits<uint64_t>::max()).get<int64_t>(), 0);
}

TEST(Json, ValuesOfAnotherTypeAreDefaults) {
  const Json json = Json::parse(R"({"text":"x","number":7,"list":[1]})");
  EXPECT_EQ(json["none"]["deeper"].text(), "");
  EXPECT_EQ(json["text"].get<int64_t>(), 0);
  EXPECT_EQ(json["number"].get<float>(), 7.0f);
  EXPECT_EQ(json["number"].items().size(), 0u);
  EXPECT_EQ(json["number"].begin(), json["number"].end());
  EXPECT_EQ(json.value("text", int64_t{-1}), -1);
  EXPECT_EQ(json.value("number", int64_t{-1}), 7);
  EXPECT_EQ(json.value("number", "fallback"), "fallback");
  EXPECT_EQ(json.value("none", Json(3)), 3);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
