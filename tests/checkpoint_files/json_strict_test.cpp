// Strict JSON, and text that is safe to print.
#include "io/json_strict.h"

#include <cmath>
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
  EXPECT_LE(parsed.status().message().size(), 400u);
  return parsed.status().message();
}

TEST(JsonStrict, BuildsTheSameTreeAsNlohmann) {
  for (const char* text :
       {R"({"a":[1,-2,3.5,true,null,"x",{"b":[]}],"é":"名\u0041\n","c":{"d":{"e":[[],[[1]]]}}})",
        "[]", " {} \n", "12", "\"x\"", "null", R"([{"a":1},{"a":2}])", "18446744073709551615",
        R"({"":{"":""}})"})
    EXPECT_EQ(must(parse_json_strict(text))->dump(), nlohmann::json::parse(text).dump());
}

TEST(JsonStrict, NamesPositionAndReason) {
  const std::pair<std::string, const char*> cases[] = {
      {R"({"a":1,"a":2})", "byte 10: duplicate key 'a'"},
      {R"({"x":{"a":1},"y":{"a":1,"b":2,"\u0061":3}})", "byte 38: duplicate key 'a'"},
      {"{\"a\":1}\xC3", "byte 7: invalid UTF-8 in JSON"},
      {std::string("{}\0", 3), "byte 2: NUL byte in JSON"},
      {"{} {}", "byte 4: syntax error"},
      {"", "byte 1: syntax error"},
      {"[1,]", "byte 4: syntax error"},
      {"[-Infinity]", "syntax error at '-Infinity'"},
      {"[01]", "byte 3"},
      {"[\"" + std::string(100000, 'x'), "missing closing quote"},
      {R"({"a": 1, "rope": {"type": None}})", "byte 27: syntax error at 'None', key 'rope.type': "},
      {R"({"limits": [0.0, nan]})", "syntax error at 'nan', key 'limits[1]': "},
      {R"({"layers": [{"a": 1}, {"b": nan}]})", "syntax error at 'nan', key 'layers[1].b': "},
      {R"({"x": 1)", "syntax error at the end of the text"},
      {"{\"\x1B[31m\": nope}", "invalid"},
      {"{\"" + std::string(100000, 'k') + "\": " + std::string(100000, 'w') + "}", "byte"},
  };
  for (const auto& [text, words] : cases) EXPECT_THAT(refusal(text), HasSubstr(words));
}

// Python's json.dumps writes such numbers into config.json files.
TEST(JsonStrict, NonFiniteNumbersAreReadIfTheyAreAllowed) {
  JsonLimits limits;
  limits.non_finite = true;
  const auto parsed = must(parse_json_strict(
      R"({"a":[0.0,Infinity],"b":-Infinity,"c":NaN,"d":"NaN, \"Infinity\"","e":[NaN,NaN],)"
      R"("NaN":1E0,"f":1e0})",
      limits));
  EXPECT_EQ(parsed->dump(-1, false, true),
            R"({"NaN":1.0,"a":[0.0,Infinity],"b":-Infinity,"c":NaN,"d":"NaN, \"Infinity\"",)"
            R"("e":[NaN,NaN],"f":1.0})");
  EXPECT_EQ(parsed->dump(), R"({"NaN":1.0,"a":[0.0,null],"b":null,"c":null,)"
                            R"("d":"NaN, \"Infinity\"","e":[null,null],"f":1.0})");
  EXPECT_EQ(describe_json((*parsed)["b"]), "-Infinity");
  EXPECT_EQ(exact_int64((*parsed)["b"]), std::nullopt);
  for (const char* text :
       {"[nan]", "[inf]", "[NAN]", "[infinity]", "[+Infinity]", "[-NaN]", "[NaN1]", "[1NaN]",
        "[1.NaN]", "[NaN.5]", "[Infinity2]", "[- Infinity]", "{NaN:1}", "[NaN NaN]", "[1e400]"})
    EXPECT_NE(refusal(text, limits), "accepted") << text;
  for (const char* text : {"[NaN]", "[Infinity]", "[-Infinity]"}) {
    EXPECT_EQ(refusal(text, limits), "accepted");
    EXPECT_NE(refusal(text), "accepted");
  }
  // A word is never confused with a number of the file: it is refused if no form is left for it.
  std::string text = "[NaN";
  for (int i = 0; i < 10; ++i)
    for (int j = 0; j < 10; ++j) text += "," + std::to_string(i) + "E" + std::to_string(j);
  EXPECT_NE(refusal(text + "]", limits), "accepted");
  text.resize(text.size() - 4);
  const auto numbers = must(parse_json_strict(text + "]", limits));
  for (size_t i = 0; i < numbers->size(); ++i)
    EXPECT_EQ(std::isnan((*numbers)[i].get<double>()), i == 0) << i;
}

TEST(JsonStrict, KeepsItsLimits) {
  JsonLimits limits;
  limits.max_bytes = 40;
  limits.max_depth = 3;
  limits.max_members = 2;
  limits.max_elements = 4;
  limits.max_values = 9;
  const std::pair<std::string, const char*> cases[] = {
      {"[[[1]]]", "accepted"},
      {"[[[[1]]]]", "byte 4: expected at most 3 levels of nesting"},
      {R"([[{"a":{}}]])", "byte 8: expected at most 3 levels of nesting"},
      {R"({"a":1,"b":2})", "accepted"},
      {R"({"a":1,"b":2,"c":3})", "at most 2 keys"},
      {"[1,2,3,4]", "accepted"},
      {"[1,2,3,4,5]", "at most 4 elements"},
      {"[[1,2,3],[1,2,3]]", "accepted"},  // 9 values
      {"[[1,2,3],[1,2,3,4]]", "at most 9 values"},
      {std::string(38, ' ') + "{}", "accepted"},
      {std::string(39, ' ') + "{}", "JSON: expected at most 40 bytes, got 41"},
  };
  for (const auto& [text, words] : cases) EXPECT_THAT(refusal(text, limits), HasSubstr(words));
}

TEST(JsonStrict, OnlyIntegerLiteralsAreIntegers) {
  const auto exact = [](const char* text) { return exact_int64(*parse_json_strict(text)); };
  EXPECT_EQ(exact("-7"), -7);
  EXPECT_EQ(exact("9223372036854775807"), INT64_MAX);
  EXPECT_EQ(exact("-9223372036854775808"), INT64_MIN);
  for (const char* text : {"9223372036854775808", "18446744073709551615", "18446744073709551616",
                           "-9223372036854775809", "2.0", "1e3", "\"2\"", "true", "null", "[2]"})
    EXPECT_EQ(exact(text), std::nullopt) << text;
}

TEST(JsonStrict, FilesNameTheirPath) {
  TempDir dir;
  const std::string path = dir.file("x.json");
  EXPECT_THAT(read_json_file(path), Refused(Code::kIo, path));
  EXPECT_OK(write_text_file(path, "{\"a\":1}"));
  EXPECT_EQ((*must(read_json_file(path)))["a"], 1);
  EXPECT_OK(write_text_file(path, "{"));
  EXPECT_THAT(read_json_file(path), Refused(Code::kBadInput, path + ": byte"));
  JsonLimits small;
  small.max_bytes = 0;
  EXPECT_THAT(read_json_file(path, small).status().message(), HasSubstr("at most 0 bytes, got 1"));
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
  EXPECT_EQ(finite_float(Json(-3)), -3.0f);
  EXPECT_EQ(finite_float(Json(3.4028234663852886e38)), std::numeric_limits<float>::max());
  for (const Json& other :
       {Json(3.4028235e38), Json(-1e39), Json(std::numeric_limits<double>::infinity()),
        Json(std::nan("")), Json("1"), Json(true), Json()})
    EXPECT_EQ(finite_float(other), std::nullopt) << describe_json(other);
}

TEST(DescribeJson, NamesKindAndSize) {
  EXPECT_EQ(describe_json(Json("a\n")), "\"a\\x0A\"");
  EXPECT_EQ(describe_json(Json::array({1, 2})), "an array of 2");
  EXPECT_EQ(describe_json(Json(2.5)), "2.5");
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
