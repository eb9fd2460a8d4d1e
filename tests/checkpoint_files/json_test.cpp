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
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr uint64_t kMostU64 = std::numeric_limits<uint64_t>::max();

// One expression in both types.
template <class J>
J built() {
  const std::vector<std::string> names = {"a", "b\n\"c\"", "é 名", "\x7F\x01"};
  J json;
  json["null"] = nullptr;
  json["numbers"] = {1, -2, int64_t{1} << 62, kMostU64, 2.5, 1.702f, 1e-6, 1e300, -0.0};
  json["bounds"] = {std::numeric_limits<int64_t>::min(), kInf, std::nan("")};
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
  std::vector<std::string> texts = {built<ordered_json>().dump(),
                                    R"({"b":1,"a":2,"b":{"c":[]}})",
                                    "[]",
                                    " 12 ",
                                    "-0",
                                    "1E5",
                                    "[1,]",
                                    "{\"a\"}",
                                    "",
                                    "nul",
                                    "18446744073709551616",
                                    std::string(200, '[') + std::string(200, ']')};
  // Object sizes below and above the threshold for a map of names. If names repeat, the last one
  // counts and takes the first one's place.
  for (const int members : {3, 16, 17, 100}) {
    std::string text = "{";
    for (int i = 0; i < members; ++i)
      text += "\"n" + std::to_string(i) + "\":" + std::to_string(i) + ",";
    for (int i = 0; i < members; i += 2) text += "\"n" + std::to_string(i) + "\":-1,";
    text.back() = '}';
    texts.push_back(text);
  }
  for (const std::string& text : texts) {
    const ordered_json expected = ordered_json::parse(text, nullptr, false);
    const Json json = Json::parse(text);
    EXPECT_EQ(json.is_discarded(), expected.is_discarded()) << text;
    if (!expected.is_discarded()) EXPECT_EQ(json.dump(), expected.dump());
  }
  // Deeper text would be destroyed and written by equally deep recursion.
  for (const size_t depth : {256, 257, 1000000})
    EXPECT_EQ(Json::parse(std::string(depth, '[') + std::string(depth, ']')).is_discarded(),
              depth > 256);
}

TEST(Json, NumbersAreEqualByValue) {
  EXPECT_EQ(Json(1), Json(uint64_t{1}));
  EXPECT_EQ(Json(1), Json(1.0));
  EXPECT_FALSE(Json(-1) == Json(kMostU64));
  EXPECT_FALSE(Json(1) == Json(true));
  EXPECT_FALSE(Json("1") == Json(1));
  EXPECT_EQ(Json::parse(built<Json>().dump())["numbers"], built<Json>()["numbers"]);
}

// Casting a number to a type that cannot hold it is undefined behaviour. Values of another type are
// defaults too.
TEST(Json, WhatATypeCannotHoldIsItsDefault) {
  for (const double number : {1e300, -1e300, 0x1p63, std::nan("")})
    EXPECT_EQ(Json(number).get<int64_t>(), 0) << number;
  EXPECT_EQ(Json(-0x1p63).get<int64_t>(), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(Json(-1.0).get<uint64_t>(), 0u);
  EXPECT_EQ(Json(0x1p64).get<uint64_t>(), 0u);
  EXPECT_EQ(Json(7.9).get<int>(), 7);
  EXPECT_EQ(Json(-1).get<uint64_t>(), 0u);
  EXPECT_EQ(Json(int64_t{1} << 40).get<int32_t>(), 0);
  EXPECT_EQ(Json(kMostU64).get<int64_t>(), 0);
  const Json json = Json::parse(R"({"text":"x","number":7,"list":[1]})");
  EXPECT_EQ(json["none"]["deeper"].text(), "");
  EXPECT_EQ(json["text"].get<int64_t>(), 0);
  EXPECT_EQ(json["number"].begin(), json["number"].end());
  EXPECT_EQ(json.value("text", int64_t{-1}), -1);
  EXPECT_EQ(json.value("number", int64_t{-1}), 7);
  EXPECT_EQ(json.value("number", "fallback"), "fallback");
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
