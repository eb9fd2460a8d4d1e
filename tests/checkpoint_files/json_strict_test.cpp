// Strict JSON, and text that is safe to print.
#include "io/json_strict.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "io/files.h"
#include "io/output_file.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

std::string refusal(std::string_view text, const JsonLimits& limits = {}) {
  const Result<Json> parsed = parse_json_strict(text, limits);
  if (parsed.ok()) return "accepted";
  EXPECT_EQ(parsed.status().code(), Code::kBadInput);
  return parsed.status().message();
}

TEST(JsonStrict, BuildsTheSameTreeAsNlohmann) {
  for (const char* text :
       {R"({"a":[1,-2,3.5,true,null,"x",{"b":[]}],"é":"名\u0041\n","c":{"d":{"e":[[],[[1]]]}}})",
        "[]", " {} \n", "12", "\"x\"", "null", R"([{"a":1},{"a":2}])", "18446744073709551615",
        R"({"":{"":""}})"}) {
    const auto parsed = must(parse_json_strict(text));
    EXPECT_EQ(parsed->dump(), nlohmann::json::parse(text).dump());
  }
}

TEST(JsonStrict, NamesPositionAndReason) {
  EXPECT_EQ(refusal(R"({"a":1,"a":2})"), "byte 10: duplicate key 'a'");
  EXPECT_EQ(refusal(R"({"x":{"a":1},"y":{"a":1,"b":2,"\u0061":3}})"), "byte 38: duplicate key 'a'");
  EXPECT_EQ(refusal("{\"a\":1}\xC3"), "byte 7: invalid UTF-8 in JSON");
  EXPECT_EQ(refusal(std::string_view("{}\0", 3)), "byte 2: NUL byte in JSON");
  EXPECT_THAT(refusal("{} {}"), StartsWith("byte 4: syntax error"));
  EXPECT_THAT(refusal(""), StartsWith("byte 1: syntax error"));
  EXPECT_THAT(refusal("[1,]"), StartsWith("byte 4: syntax error"));
  EXPECT_THAT(refusal("[-Infinity]"), HasSubstr("syntax error at '-Infinity'"));
  EXPECT_THAT(refusal("[01]"), HasSubstr("byte 3"));
  EXPECT_THAT(refusal("[\"" + std::string(100000, 'x')), HasSubstr("missing closing quote"));
  EXPECT_LE(refusal("[\"" + std::string(100000, 'x')).size(), 300u);
}

TEST(JsonStrict, SyntaxErrorsNameTheWordAndItsKey) {
  EXPECT_THAT(refusal(R"({"a": 1, "rope": {"type": None}})"),
              StartsWith("byte 27: syntax error at 'None', key 'rope.type': "));
  EXPECT_THAT(refusal(R"({"limits": [0.0, nan]})"),
              HasSubstr("syntax error at 'nan', key 'limits[1]': "));
  EXPECT_THAT(refusal(R"({"x": True, "y": 1})"), HasSubstr("syntax error at 'True', key 'x': "));
  EXPECT_THAT(refusal(R"({"x": 1)"), HasSubstr("syntax error at the end of the text"));
  EXPECT_THAT(refusal("{\"\x1B[31m\": nope}"), HasSubstr("invalid"));
  EXPECT_LE(
      refusal("{\"" + std::string(100000, 'k') + "\": " + std::string(100000, 'w') + "}").size(),
      400u);
}

// Python's json.dumps writes such numbers into config.json files.
TEST(JsonStrict, NonFiniteNumbersAreReadWhereTheyAreAllowed) {
  JsonLimits limits;
  limits.non_finite = true;
  const auto parsed = must(parse_json_strict(
      R"({"a":[0.0,Infinity],"b":-Infinity,"c":NaN,"d":"NaN, \"Infinity\"","e":[NaN,NaN],"NaN":1E0,"f":1e0})",
      limits));
  EXPECT_EQ((*parsed)["a"][1].get<double>(), std::numeric_limits<double>::infinity());
  EXPECT_EQ((*parsed)["b"].get<double>(), -std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan((*parsed)["c"].get<double>()));
  EXPECT_EQ((*parsed)["d"].text(), "NaN, \"Infinity\"");
  EXPECT_TRUE(std::isnan((*parsed)["e"][1].get<double>()));
  EXPECT_EQ((*parsed)["NaN"].get<double>(), 1);
  EXPECT_EQ(
      parsed->dump(),
      R"({"NaN":1.0,"a":[0.0,null],"b":null,"c":null,"d":"NaN, \"Infinity\"","e":[null,null],"f":1.0})");
  EXPECT_EQ((*parsed)["a"].dump(-1, false, true), "[0.0,Infinity]");
  EXPECT_EQ(describe_json((*parsed)["b"]), "-Infinity");
  EXPECT_EQ(describe_json((*parsed)["c"]), "NaN");
  EXPECT_EQ(exact_int64((*parsed)["b"]), std::nullopt);
  for (const char* text :
       {"[nan]", "[inf]", "[NAN]", "[infinity]", "[+Infinity]", "[-NaN]", "[NaN1]", "[1NaN]",
        "[1.NaN]", "[NaN.5]", "[Infinity2]", "[- Infinity]", "{NaN:1}", "[NaN NaN]", "[1e400]"})
    EXPECT_FALSE(parse_json_strict(text, limits).ok()) << text;
  for (const char* text : {"[NaN]", "[Infinity]", "[-Infinity]"})
    EXPECT_FALSE(parse_json_strict(text).ok()) << text;
  const auto alone = must(parse_json_strict(" -Infinity ", limits));
  EXPECT_TRUE(std::isinf(alone->get<double>()));
}

// A word is never confused with a number of the file.
TEST(JsonStrict, NoNumberIsTakenForAWord) {
  JsonLimits limits;
  limits.non_finite = true;
  std::string text = "[NaN";
  for (int i = 0; i < 10; ++i)
    for (int j = 0; j < 10; ++j) text += "," + std::to_string(i) + "E" + std::to_string(j);
  EXPECT_FALSE(parse_json_strict(text + "]", limits).ok());  // no form is left, so it is refused
  text.resize(text.size() - 4);
  const auto parsed = must(parse_json_strict(text + "]", limits));
  EXPECT_TRUE(std::isnan((*parsed)[0].get<double>()));
  for (size_t i = 1; i < parsed->size(); ++i)
    EXPECT_TRUE(std::isfinite((*parsed)[i].get<double>())) << i;
}

TEST(JsonStrict, KeepsItsLimits) {
  JsonLimits limits;
  limits.max_bytes = 40;
  limits.max_depth = 3;
  limits.max_members = 2;
  limits.max_elements = 4;
  limits.max_values = 9;
  const auto accepted = "accepted";
  EXPECT_EQ(refusal("[[[1]]]", limits), accepted);
  EXPECT_EQ(refusal("[[[[1]]]]", limits), "byte 4: expected at most 3 levels of nesting");
  EXPECT_EQ(refusal(R"([[{"a":{}}]])", limits), "byte 8: expected at most 3 levels of nesting");
  EXPECT_EQ(refusal(R"({"a":1,"b":2})", limits), accepted);
  EXPECT_THAT(refusal(R"({"a":1,"b":2,"c":3})", limits), HasSubstr("at most 2 keys"));
  EXPECT_EQ(refusal("[1,2,3,4]", limits), accepted);
  EXPECT_THAT(refusal("[1,2,3,4,5]", limits), HasSubstr("at most 4 elements"));
  EXPECT_EQ(refusal("[[1,2,3],[1,2,3]]", limits), accepted);  // 9 values
  EXPECT_THAT(refusal("[[1,2,3],[1,2,3,4]]", limits), HasSubstr("at most 9 values"));
  EXPECT_EQ(refusal(std::string(38, ' ') + "{}", limits), accepted);
  EXPECT_EQ(refusal(std::string(39, ' ') + "{}", limits),
            "JSON: expected at most 40 bytes, got 41");
}

TEST(JsonStrict, OnlyIntegerLiteralsAreIntegers) {
  const auto exact = [](const char* text) { return exact_int64(*parse_json_strict(text)); };
  EXPECT_EQ(exact("0"), 0);
  EXPECT_EQ(exact("-7"), -7);
  EXPECT_EQ(exact("9223372036854775807"), INT64_MAX);
  EXPECT_EQ(exact("-9223372036854775808"), INT64_MIN);
  for (const char* text : {"9223372036854775808", "18446744073709551615", "18446744073709551616",
                           "-9223372036854775809", "2.0", "1e3", "\"2\"", "true", "null", "[2]"})
    EXPECT_EQ(exact(text), std::nullopt) << text;
}

TEST(JsonStrict, FilesNameTheirPath) {
  TempDir dir;
  EXPECT_EQ(read_json_file(dir.file("none.json")).status().code(), Code::kIo);
  EXPECT_OK(write_text_file(dir.file("x.json"), "{\"a\":1}"));
  const auto good = must(read_json_file(dir.file("x.json")));
  EXPECT_EQ((*good)["a"], 1);
  EXPECT_OK(write_text_file(dir.file("x.json"), "{"));
  const Status status = read_json_file(dir.file("x.json")).status();
  EXPECT_EQ(status.code(), Code::kBadInput);
  EXPECT_THAT(status.message(), StartsWith(dir.file("x.json") + ": byte"));
  JsonLimits small;
  small.max_bytes = 0;
  EXPECT_THAT(read_json_file(dir.file("x.json"), small).status().message(),
              HasSubstr("at most 0 bytes, got 1"));
  EXPECT_EQ(read_json_file(dir.path().string()).status().code(), Code::kBadInput);  // a directory
  EXPECT_FALSE(std::filesystem::exists(partial_path(dir.file("x.json"))));
  EXPECT_EQ(write_text_file(dir.file("none/x.json"), "").code(), Code::kIo);
}

TEST(Utf8, FindsTheFirstBadByte) {
  EXPECT_EQ(find_invalid_utf8("a é 名 😀"), std::string::npos);
  EXPECT_EQ(find_invalid_utf8("ab\x80"), 2u);
  EXPECT_EQ(find_invalid_utf8("\xC0\x80"), 0u);
  EXPECT_EQ(find_invalid_utf8("\xE0\x9F\xBF"), 0u);
  EXPECT_EQ(find_invalid_utf8("\xEF\xBF\xBF"), std::string::npos);
  EXPECT_EQ(find_invalid_utf8("x\xED\xA0\x80"), 1u);
  EXPECT_EQ(find_invalid_utf8("\xF0\x8F\xBF\xBF"), 0u);
  EXPECT_EQ(find_invalid_utf8("\xF4\x8F\xBF\xBF"), std::string::npos);
  EXPECT_EQ(find_invalid_utf8("\xF4\x90\x80\x80"), 0u);
  EXPECT_EQ(find_invalid_utf8("\xF8\x88\x80\x80\x80"), 0u);
}

TEST(FiniteFloat, IsANumberOfFloatsRange) {
  EXPECT_EQ(finite_float(Json(0.5)), 0.5f);
  EXPECT_EQ(finite_float(Json(-3)), -3.0f);
  EXPECT_EQ(finite_float(Json(3.4028234663852886e38)), std::numeric_limits<float>::max());
  for (const double number : {3.4028235e38, -1e39, 1e300, std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::quiet_NaN()})
    EXPECT_EQ(finite_float(Json(number)), std::nullopt) << number;
  EXPECT_EQ(finite_float(Json("1")), std::nullopt);
  EXPECT_EQ(finite_float(Json(true)), std::nullopt);
  EXPECT_EQ(finite_float(Json()), std::nullopt);
}

TEST(DescribeJson, NamesKindAndSize) {
  EXPECT_EQ(describe_json(Json("a\n")), "\"a\\x0A\"");
  EXPECT_EQ(describe_json(Json::array({1, 2})), "an array of 2");
  EXPECT_EQ(describe_json(Json(2.5)), "2.5");
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
