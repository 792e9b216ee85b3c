//! The arithmetic of reservations gives the same bits in Rust and in Redis.

use fleet::{
    outbound::{AnswerRate, DialSums, held},
    rules::PROBABILITY_UNIT,
};
use testkit::{dice::Dice, redis::RedisServer};

/// The part of the library that precedes the first code of Redis: constants and arithmetic.
fn arithmetic() -> String {
    let library = store::Functions::default().schema_2.library;
    let from = library.code.find("-- Declared in Rust").expect("the constants are declared");
    let to = library.code.find("-- prelude:").expect("the prelude follows");
    library.code[from..to].to_owned()
}

/// Runs a script after the arithmetic. Each reply is one number per line of arguments.
fn evaluate(server: &RedisServer, script: &str, arguments: &[String]) -> Vec<u64> {
    let script = format!("{}\nlocal out = {{}}\n{script}\nreturn out", arithmetic());
    let replies: Vec<String> = redis::cmd("EVAL")
        .arg(script)
        .arg(0)
        .arg(arguments)
        .query(&mut server.connection())
        .expect("the script runs");
    replies.iter().map(|text| text.parse().expect("a whole number")).collect()
}

#[test]
fn redis_holds_the_same_slots_as_the_model() {
    const SCRIPT: &str = "for i = 1, #ARGV, 4 do
        local slots = ARITHMETIC.held_slots(tonumber(ARGV[i]), tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]),
          tonumber(ARGV[i + 3]))
        out[#out + 1] = string.format('%.17g', slots)
      end";
    let server = RedisServer::start(&[]);
    let mut dice = Dice(11);
    for _ in 0..40 {
        let (mut arguments, mut expected) = (Vec::new(), Vec::new());
        for _ in 0..500 {
            let kinds: Vec<u64> =
                (0..=dice.roll(2)).map(|_| dice.between(1, PROBABILITY_UNIT)).collect();
            let mut sums = DialSums::default();
            let most = [4, 40, 400, 3_000][dice.roll(4)];
            (0..=dice.roll(most)).for_each(|_| sums.add(kinds[dice.roll(kinds.len())]));
            let target =
                [0.0, 0.0000001, 0.00003, 0.004, 0.01, 0.013, 0.25, 0.5, 0.9][dice.roll(9)];
            let DialSums { dials, probability, variance } = sums;
            arguments.extend([dials, probability, variance].map(|sum| sum.to_string()));
            arguments.push(target.to_string());
            expected.push((sums, target, held(sums, target)));
        }
        for (got, (sums, target, slots)) in
            evaluate(&server, SCRIPT, &arguments).into_iter().zip(&expected)
        {
            assert_eq!(got, *slots, "{sums:?}, target {target}");
        }
    }
}

#[test]
fn redis_learns_the_same_answer_rate_as_the_model() {
    const SCRIPT: &str = "local dials, answers = ARITHMETIC.first_answer_rate()
      for i = 1, #ARGV, 2 do
        dials, answers =
          ARITHMETIC.record_dial_ended(dials, answers, ARGV[i] == '1', tonumber(ARGV[i + 1]))
        local p = ARITHMETIC.answer_probability(dials, answers, tonumber(ARGV[i + 1]))
        for _, number in ipairs({dials, answers, p}) do
          out[#out + 1] = string.format('%.17g', number)
        end
      end";
    let server = RedisServer::start(&[]);
    let mut dice = Dice(12);
    for percent in [0, 5, 30, 70, 100] {
        let ends: Vec<(bool, u64)> =
            (0..1_000).map(|_| (dice.percent(percent), dice.between(0, 400))).collect();
        let arguments: Vec<String> = ends
            .iter()
            .flat_map(|(end, outstanding)| [u64::from(*end), *outstanding])
            .map(|number| number.to_string())
            .collect();
        let mut rate = AnswerRate::default();
        let expected: Vec<u64> = ends
            .iter()
            .flat_map(|&(end, outstanding)| {
                rate.record(end, outstanding);
                [rate.dials, rate.answers, rate.probability_among(outstanding)]
            })
            .collect();
        assert_eq!(evaluate(&server, SCRIPT, &arguments), expected, "{percent} % answer");
    }
}
